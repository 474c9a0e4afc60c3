//! The web page of the admin port and its figures: open where nobody is asked, else of the reader's
//! namespaces alone.

use super::support::{self, spec, start};
use super::{Guarded, principal, token};
use kvd::RunningDaemon;
use kvd_proto::v1;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use tonic::Request;
use tonic::metadata::MetadataValue;

/// Head and body of a page.
async fn get_page(running: &RunningDaemon, path: &str, token: Option<&str>) -> [String; 2] {
    let admin = running.admin_address().unwrap();
    let (path, token) = (path.to_owned(), token.map(str::to_owned));
    let get = move || read_page(admin, &path, token.as_deref());
    tokio::task::spawn_blocking(get).await.unwrap()
}

fn read_page(admin: SocketAddr, path: &str, token: Option<&str>) -> [String; 2] {
    let mut socket = TcpStream::connect(admin).unwrap();
    let shown = token.map(|token| format!("Authorization: Bearer {token}\r\n"));
    let head = format!("GET {path} HTTP/1.0\r\nHost: kvd\r\n{}\r\n", shown.unwrap_or_default());
    socket.write_all(head.as_bytes()).unwrap();
    let mut text = String::new();
    socket.read_to_string(&mut text).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    [head.to_lowercase(), body.to_owned()]
}

/// Registers a model and opens a sequence of it, as a principal in a namespace; their ids.
async fn open_sequence(running: &RunningDaemon, namespace: &str, token: Option<&str>) -> [u64; 2] {
    let mut rpc = support::rpc(running).await;
    let register = with_caller(spec(), namespace, token);
    let model_id = rpc.register_model(register).await.unwrap().into_inner().model_id;
    let open = v1::OpenSequenceRequest { model_id, ..Default::default() };
    let opened = rpc.open_sequence(with_caller(open, namespace, token)).await.unwrap();
    [model_id, opened.into_inner().sequence_id]
}

fn with_caller<T>(message: T, namespace: &str, token: Option<&str>) -> Request<T> {
    let mut request = Request::new(message);
    let namespace = MetadataValue::try_from(namespace).unwrap();
    request.metadata_mut().insert("kvd-namespace", namespace);
    if let Some(token) = token {
        let bearer = MetadataValue::try_from(format!("Bearer {token}")).unwrap();
        request.metadata_mut().insert("authorization", bearer);
    }
    request
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_page_runs_its_own_script_alone_and_the_figures_name_what_is_held() {
    let running = start(&[("admin.listen", "127.0.0.1:0")]).await;
    let [model, sequence] = open_sequence(&running, "default", None).await;
    let [head, page] = get_page(&running, "/", None).await;
    assert!(head.starts_with("http/1.0 200") && head.contains("text/html"), "{head}");
    let nonce = head.split("script-src 'nonce-").nth(1).unwrap().split('\'').next().unwrap();
    assert!(nonce.len() == 32 && head.contains("default-src 'none'"), "{head}");
    for tag in ["<script", "<style"] {
        assert!(page.contains(&format!("{tag} nonce=\"{nonce}\">")), "{tag} has not the nonce");
    }
    for outside in ["http://", "https://", "src=", "@import", "url(", "{nonce}", "innerHTML"] {
        assert!(!page.contains(outside), "the page has {outside}");
    }
    let [other, _] = get_page(&running, "/", None).await;
    assert!(!other.contains(nonce), "a nonce came twice");

    let [head, body] = get_page(&running, "/overview.json", None).await;
    assert!(head.starts_with("http/1.0 200") && head.contains("application/json"), "{head}");
    assert!(head.contains("cache-control: no-store"), "{head}");
    let overview: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!(overview["ready"], true);
    assert_eq!(overview["pools"][0]["capacity_bytes"], 64 << 20);
    assert_eq!(overview["models"][0]["id"], model.to_string());
    assert_eq!(overview["sequences"][0]["id"], sequence.to_string());
    assert_eq!(overview["sequences"][0]["model"], model.to_string());
    assert_eq!(overview["sequences_open"], 1);
    running.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn figures_are_of_the_namespaces_that_their_reader_may_use() {
    let principals = principal("team-a", &["a"], &["use"])
        + &principal("team-b", &["b"], &["operate", "use"])
        + &principal("chief", &["*"], &["operate"])
        + &principal("watcher", &["*"], &["read_metrics"]);
    // Open metrics open no figures: these name sequences and their owners.
    let guarded = Guarded::start(&principals, &[("admin.listen", "127.0.0.1:0")]).await;
    let running = &guarded.running;
    for namespace in ["a", "b"] {
        open_sequence(running, namespace, Some(token(&format!("team-{namespace}")))).await;
    }
    for (shown, namespaces) in [("team-a", &["a"][..]), ("team-b", &["b"]), ("chief", &["a", "b"])]
    {
        let [head, body] = get_page(running, "/overview.json", Some(token(shown))).await;
        assert!(head.starts_with("http/1.0 200"), "{shown}: {head}");
        let overview: serde_json::Value = serde_json::from_str(&body).unwrap();
        let models = overview["models"].as_array().unwrap();
        let mut told: Vec<_> = models.iter().map(|of| of["namespace"].as_str().unwrap()).collect();
        told.sort_unstable();
        assert_eq!(told, namespaces, "{shown}");
        assert_eq!(overview["sequences"].as_array().unwrap().len(), namespaces.len(), "{shown}");
        assert_eq!(overview["sequences_open"], namespaces.len(), "{shown}");
    }
    for (shown, status) in [(None, "401"), (Some("wrong"), "401"), (Some("watcher"), "403")] {
        let [head, body] = get_page(running, "/overview.json", shown).await;
        assert!(head.starts_with(&format!("http/1.0 {status}")), "{shown:?}: {head}");
        assert!(!body.contains("\"models\""), "{shown:?}: {body}");
    }
    assert!(get_page(running, "/", None).await[0].starts_with("http/1.0 200"));
    let page = guarded.metrics();
    let refused = "kvd_access_refusals_total{reason=\"unauthenticated\"} 2";
    assert!(page.contains(refused), "no {refused}");
    guarded.running.drain().await;
}
