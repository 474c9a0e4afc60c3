//! Quotas: operators alone set them, for namespaces of their own; hostile values change nothing.

use super::support::channel;
use super::{Guarded, principal};
use kvd_core::ErrorCode;
use kvd_proto::v1::kvd_client::KvdClient;
use kvd_proto::v1::{QuotaChange, SetNamespaceQuotasRequest};
use tonic::{Request, Status};

/// A change of one quota.
fn order(name: &str, quota: &str, allowed: Option<u64>) -> SetNamespaceQuotasRequest {
    let changes = vec![QuotaChange { name: quota.to_owned(), allowed }];
    SetNamespaceQuotasRequest { name: name.to_owned(), changes, ..Default::default() }
}

/// A change of the weight alone.
fn weight(name: &str, weight: u32) -> SetNamespaceQuotasRequest {
    let weight = Some(weight);
    SetNamespaceQuotasRequest { name: name.to_owned(), weight, ..Default::default() }
}

fn code(answer: &Result<(), Status>) -> Option<ErrorCode> {
    answer.as_ref().err().and_then(kvd_proto::error_code)
}

async fn set_as(
    guarded: &Guarded,
    who: &str,
    order: SetNamespaceQuotasRequest,
) -> Result<(), Status> {
    let mut request = Request::new(order);
    request.metadata_mut().insert("authorization", format!("Bearer {who}").parse().unwrap());
    let mut rpc = KvdClient::new(channel(&guarded.running).await);
    rpc.set_namespace_quotas(request).await.map(drop)
}

/// Limits that are in force.
fn limits_shown(guarded: &Guarded) -> usize {
    guarded.running.service().refresh_gauges();
    guarded.metrics().lines().filter(|line| line.starts_with("kvd_quota_allowed{")).count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn operators_set_quotas_of_their_namespaces_and_nobody_else_does() {
    let principals = principal("engine", &["a"], &["use"])
        + &principal("operator", &["a"], &["operate"])
        + &principal("watcher", &["*"], &["read_metrics"]);
    let guarded = Guarded::start(&principals, &[]).await;
    for (who, name, refusal) in [
        ("engine", "a", ErrorCode::PermissionDenied),
        ("watcher", "a", ErrorCode::PermissionDenied),
        ("nobody", "a", ErrorCode::Unauthenticated),
        ("operator", "b", ErrorCode::NamespaceDenied),
        ("operator", "c", ErrorCode::NamespaceDenied),
    ] {
        let answer = set_as(&guarded, who, order(name, "sequences", Some(0))).await;
        assert_eq!(code(&answer), Some(refusal), "{who} {name}: {answer:?}");
    }
    assert_eq!(limits_shown(&guarded), 0);
    set_as(&guarded, "operator", order("a", "sequences", Some(0))).await.unwrap();
    assert_eq!(limits_shown(&guarded), 1);
    guarded.running.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hostile_values_are_told_what_is_wrong_and_change_nothing() {
    let guarded = Guarded::start(&principal("operator", &["*"], &["operate"]), &[]).await;
    let long = "n".repeat(1 << 16);
    let none = SetNamespaceQuotasRequest { name: "a".to_owned(), ..Default::default() };
    let mut twice = order("a", "models", Some(1));
    twice.changes.push(twice.changes[0].clone());
    let mut many = twice.clone();
    many.changes = vec![QuotaChange { name: long.clone(), allowed: None }; 100];
    for (request, part) in [
        (order("", "models", Some(1)), "name: "),
        (order("a b", "models", Some(1)), "name: "),
        (order(&long, "models", Some(1)), "name: "),
        (order("a", "", Some(1)), "there is no quota \"\""),
        (order("a", "pages", Some(1)), "there are pool_bytes"),
        (order("a", "models", Some(u64::MAX)), "out of range"),
        (order("a", "reserved_bytes", Some(65 << 20)), "device.pool_bytes"),
        (order("a", "reserved_bytes", Some(u64::MAX - 1)), "device.pool_bytes"),
        (weight("a", 0), "weight: a weight is 1 to 1000, not 0"),
        (weight("a", 1001), "not 1001"),
        (weight("a", u32::MAX), "weight: "),
        (none, "changes: there are none"),
        (twice, "stands twice"),
        (many, "there is no quota"),
    ] {
        let status = set_as(&guarded, "operator", request).await.unwrap_err();
        assert_eq!(kvd_proto::error_code(&status), Some(ErrorCode::InvalidArgument), "{status:?}");
        assert!(status.message().contains(part), "{status:?}");
        assert!(status.message().len() < 400, "{} bytes", status.message().len());
    }
    assert_eq!(limits_shown(&guarded), 0);
    // Below what is there, and of a namespace that holds nothing: both are fine.
    set_as(&guarded, "operator", order("b", "pool_bytes", Some(0))).await.unwrap();
    assert_eq!(limits_shown(&guarded), 1);
    guarded.running.drain().await;
}
