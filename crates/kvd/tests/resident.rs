//! Memory of what is gone comes back: models that are unregistered, connections that have closed.
#![expect(clippy::unwrap_used, reason = "a set-up that fails is a test that fails")]

mod support;

use kvd_proto::v1;

/// Bytes that a model may leave behind; 3,200 were seen where something was not freed.
const MODEL_LEFT_MAX: i64 = 800;
/// Bytes that a connection may leave behind; 660 were seen.
const CONNECTION_LEFT_MAX: i64 = 300;

fn resident_bytes() -> i64 {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').nth(1).unwrap().parse::<i64>().unwrap() * 4096
}

fn inline(bytes: Vec<u8>) -> Option<v1::Payload> {
    Some(v1::Payload { source: Some(v1::payload::Source::Inline(bytes.into())) })
}

/// Growth of this process by turn, after as many turns again have warmed it up.
async fn growth(turns: i64, mut turn: impl AsyncFnMut(i64)) -> i64 {
    for number in 0..turns {
        turn(number).await;
    }
    let before = resident_bytes();
    for number in turns..2 * turns {
        turn(number).await;
    }
    (resident_bytes() - before) / turns
}

/// One test, so that no other grows the process meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_gone_takes_no_memory() {
    let running = support::start(&[("log.filter", "error")]).await;
    let mut rpc = support::rpc(&running).await;
    let rows = vec![0x3f; 130 * 64 * 4];
    let models = growth(1000, async |number| {
        let (name, codec) = (format!("model-{number}"), "kvcomp".to_owned());
        let spec = v1::RegisterModelRequest { name, codec, ..support::spec() };
        let model_id = rpc.register_model(spec).await.unwrap().into_inner().model_id;
        let open = v1::OpenSequenceRequest { model_id, ..Default::default() };
        let sequence_id = rpc.open_sequence(open).await.unwrap().into_inner().sequence_id;
        let (k, v) = (inline(rows.clone()), inline(rows.clone()));
        let store = v1::StoreBlocksRequest { sequence_id, layer: 0, start: 0, tokens: 130, k, v };
        let mut stored = rpc.store_blocks(tokio_stream::once(store)).await.unwrap().into_inner();
        while stored.message().await.unwrap().is_some() {}
        rpc.attend(support::attend_nothing(model_id, sequence_id)).await.unwrap();
        let close = v1::CloseSequenceRequest { sequence_id, ..Default::default() };
        rpc.close_sequence(close).await.unwrap();
        rpc.unregister_model(v1::UnregisterModelRequest { model_id }).await.unwrap();
    });
    let left = models.await;
    println!("{left} bytes left by each model");
    assert!(left <= MODEL_LEFT_MAX, "{left} bytes left by each model");

    let model_id = rpc.register_model(support::spec()).await.unwrap().into_inner().model_id;
    let open = v1::OpenSequenceRequest { model_id, ..Default::default() };
    let sequence_id = rpc.open_sequence(open).await.unwrap().into_inner().sequence_id;
    let connections = growth(2000, async |_| {
        let mut once = support::rpc(&running).await;
        once.attend(support::attend_nothing(model_id, sequence_id)).await.unwrap();
    });
    let left = connections.await;
    println!("{left} bytes left by each connection");
    assert!(left <= CONNECTION_LEFT_MAX, "{left} bytes left by each connection");
}
