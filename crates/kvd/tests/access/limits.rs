//! Limits of principals: what one has in the daemon at once, over all its connections.

use super::support::channel;
use super::{Guarded, principal};
use kvd_client::ErrorCode;
use kvd_proto::v1::kvd_client::KvdClient;
use kvd_proto::v1::{HoldSessionRequest, ListModelsRequest};
use std::time::Duration;
use tonic::{Request, Status, Streaming};

/// A request of a principal in the namespace `a`.
fn request_as<T>(who: &str, message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("authorization", format!("Bearer {who}").parse().unwrap());
    request.metadata_mut().insert("kvd-namespace", "a".parse().unwrap());
    request
}

/// A call of a connection of its own.
async fn list_as(guarded: &Guarded, who: &str) -> Result<(), Status> {
    let mut rpc = KvdClient::new(channel(&guarded.running).await);
    rpc.list_models(request_as(who, ListModelsRequest::default())).await.map(drop)
}

/// A stream that holds a session of that name until it is dropped.
async fn hold_as(
    guarded: &Guarded,
    who: &str,
    name: &str,
) -> Result<Streaming<kvd_proto::v1::HoldSessionResponse>, Status> {
    let mut rpc = KvdClient::new(channel(&guarded.running).await);
    let hold = HoldSessionRequest { name: name.to_owned(), ..Default::default() };
    Ok(rpc.hold_session(request_as(who, hold)).await?.into_inner())
}

/// Whether a call of a principal is let in before long.
async fn is_let_in(guarded: &Guarded, who: &str) -> bool {
    for _ in 0..200 {
        if list_as(guarded, who).await.is_ok() {
            return true;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    false
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_principal_has_so_many_calls_at_once_and_others_are_not_touched() {
    let limited = principal("greedy", &["a"], &["use"]) + "limits = { calls_max = 2 }\n";
    let principals = limited.clone() + &principal("other", &["a"], &["use"]);
    let guarded = Guarded::start(&principals, &[("access.check_files_ms", "20")]).await;
    let first = hold_as(&guarded, "greedy", "first").await.unwrap();
    let second = hold_as(&guarded, "greedy", "second").await.unwrap();
    let status = list_as(&guarded, "greedy").await.unwrap_err();
    assert_eq!(kvd_proto::error_code(&status), Some(ErrorCode::QuotaExceeded), "{status:?}");
    let says = "principal greedy has 2 calls under way of the 2 that its limits.calls_max allows";
    assert!(status.message().contains(says), "{status:?}");
    assert!(kvd_proto::retry_after(&status).is_some(), "{status:?}");
    list_as(&guarded, "other").await.unwrap();
    let counted = "kvd_access_refusals_total{reason=\"limit\"} 1\n";
    assert!(guarded.metrics().contains(counted), "{}", guarded.metrics());
    // What is under way counts on when the file is read anew, with a higher limit.
    let higher = principals.replace("calls_max = 2", "calls_max = 3");
    std::fs::write(guarded.path("principals.toml"), higher).unwrap();
    assert!(is_let_in(&guarded, "greedy").await, "its third call");
    let third = hold_as(&guarded, "greedy", "third").await.unwrap();
    assert!(list_as(&guarded, "greedy").await.is_err(), "its fourth call");
    drop((first, second, third));
    assert!(is_let_in(&guarded, "greedy").await, "after its streams ended");
    guarded.running.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_message_beyond_the_bytes_of_its_principal_is_refused_with_both_numbers() {
    let small = "limits = { inflight_bytes_max = \"8 KiB\" }\n";
    let principals = principal("small", &["a"], &["use"]) + small;
    let principals = principals + &principal("other", &["a"], &["use"]);
    let guarded = Guarded::start(&principals, &[]).await;
    for (who, is_refused) in [("small", true), ("other", false)] {
        let mut rpc = KvdClient::new(channel(&guarded.running).await);
        let calibration = vec![0; 64 << 10].into();
        let spec = kvd_proto::v1::RegisterModelRequest { calibration, ..super::support::spec() };
        let status = rpc.register_model(request_as(who, spec)).await.unwrap_err();
        let says = "limits.inflight_bytes_max of its principal = 8192";
        assert_eq!(status.message().contains(says), is_refused, "{who}: {status:?}");
        list_as(&guarded, who).await.unwrap();
    }
    guarded.running.drain().await;
}
