//! A scrape of a daemon with a thousand models: few series each, compressed, and none
//! of models that are gone.
#![expect(clippy::unwrap_used, reason = "a set-up that fails is a test that fails")]

mod support;

use flate2::read::GzDecoder;
use kvd_proto::v1;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// Registered models.
const MODELS: usize = 1000;
/// Most series of a model that holds nothing, and of one that does.
const SERIES_MAX: [usize; 2] = [43, 49];
/// Most bytes of a compressed page.
const COMPRESSED_MAX: usize = 1_000_000;

/// Head and body of `GET /metrics`, as they came.
fn scrape(admin: SocketAddr, accept: &str) -> (String, Vec<u8>) {
    let mut stream = TcpStream::connect(admin).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let request = format!("GET /metrics HTTP/1.0\r\nhost: kvd\r\n{accept}\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    let end = answer.windows(4).position(|bytes| bytes == b"\r\n\r\n").unwrap();
    let body = answer.split_off(end + 4);
    (String::from_utf8(answer).unwrap().to_lowercase(), body)
}

fn series(page: &str, of: &str) -> usize {
    page.lines().filter(|line| !line.starts_with('#') && line.contains(of)).count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_models_are_a_small_page_and_leave_nothing_behind() {
    let max = MODELS.to_string();
    let running =
        support::start(&[("limits.models_max", &max), ("admin.listen", "127.0.0.1:0")]).await;
    let admin = running.admin_address().unwrap();
    let mut rpc = support::rpc(&running).await;
    let mut models = Vec::new();
    for number in 0..MODELS {
        let name = format!("meta-llama.Llama-3.1-8B-Instruct.{number}");
        let codec = "fp8; sink=0; recent=0; k.bound=0.5; v.bound=0.5".to_owned();
        let spec = v1::RegisterModelRequest { name, codec, ..support::spec() };
        models.push(rpc.register_model(spec).await.unwrap().into_inner().model_id);
    }
    let open = v1::OpenSequenceRequest { model_id: models[0], ..Default::default() };
    let sequence_id = rpc.open_sequence(open).await.unwrap().into_inner().sequence_id;
    let rows = v1::payload::Source::Inline(vec![0x3f; 64 * 64 * 4].into());
    let payload = || Some(v1::Payload { source: Some(rows.clone()) });
    let (k, v) = (payload(), payload());
    let store = v1::StoreBlocksRequest { sequence_id, layer: 0, start: 0, tokens: 64, k, v };
    let mut answers = rpc.store_blocks(tokio_stream::once(store)).await.unwrap().into_inner();
    answers.message().await.unwrap();

    let scraped = tokio::task::spawn_blocking(move || {
        let began = Instant::now();
        let compressed = scrape(admin, "accept-encoding: gzip\r\n");
        (compressed, began.elapsed(), scrape(admin, ""))
    });
    let ((head, body), took, (plain_head, plain)) = scraped.await.unwrap();
    assert!(head.contains("\r\ncontent-encoding: gzip"), "{head}");
    assert!(head.contains("\r\ncontent-type: text/plain; version=0.0.4"), "{head}");
    assert!(!plain_head.contains("content-encoding"), "{plain_head}");
    let mut page = String::new();
    GzDecoder::new(&body[..]).read_to_string(&mut page).unwrap();
    println!(
        "{MODELS} models: {} series, {} bytes, {} compressed, {took:?}",
        series(&page, ""),
        plain.len(),
        body.len()
    );
    assert!(body.len() < COMPRESSED_MAX, "{} bytes compressed", body.len());
    assert_eq!(series(&page, ""), series(std::str::from_utf8(&plain).unwrap(), ""));
    let of_one = |number: usize| series(&page, &format!("Instruct.{number}\""));
    assert!(of_one(0) > of_one(1), "a ratio of nothing has no series");
    assert!(of_one(1) <= SERIES_MAX[0] && of_one(0) <= SERIES_MAX[1], "{}", of_one(0));

    let close = v1::CloseSequenceRequest { sequence_id, ..Default::default() };
    rpc.close_sequence(close).await.unwrap();
    for model_id in models {
        rpc.unregister_model(v1::UnregisterModelRequest { model_id }).await.unwrap();
    }
    running.service().refresh_gauges();
    let page = running.service().metrics().render_page();
    assert_eq!(series(&page, "model="), 0, "{page}");
}
