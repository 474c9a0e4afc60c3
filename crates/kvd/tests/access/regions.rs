//! Peers of Unix sockets and regions: by the user that the kernel names.

use super::Guarded;
use kvd_client::{
    AttendBatch, AttendQuery, Client, DType, Endpoint, ErrorCode, LayerIndex, ModelId, Namespace,
    RegionClient, RegionOptions, SequenceId, SessionOptions,
};

fn own_uid() -> u32 {
    rustix::process::getuid().as_raw()
}

/// A principal of a user, with roles in the namespace `a`.
fn of_user(uid: u32, roles: &[&str]) -> String {
    format!(
        "[[principals]]\nname = \"user\"\nnamespaces = [\"a\"]\nroles = {roles:?}\nuids = [{uid}]\n"
    )
}

async fn client(guarded: &Guarded) -> Client {
    let endpoint: Endpoint =
        format!("unix:{}", guarded.path("kvd.sock").display()).parse().unwrap();
    Client::connect(endpoint).await.unwrap().with_namespace(&Namespace::new("a").unwrap())
}

fn open(guarded: &Guarded, namespace: &str) -> Result<RegionClient, kvd_client::ClientError> {
    let options = RegionOptions::default().with_namespace(&Namespace::new(namespace).unwrap());
    tokio::task::block_in_place(|| RegionClient::open_region(guarded.path("region.sock"), &options))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_listed_user_may_use_its_namespace_and_no_other() {
    let guarded = Guarded::start(&of_user(own_uid(), &["use"]), &[]).await;
    let client = client(&guarded).await;
    client.list_models().await.unwrap();
    let other = client.clone().with_namespace(&Namespace::new("b").unwrap());
    let refused = other.list_models().await.unwrap_err();
    assert_eq!(refused.code, Some(ErrorCode::NamespaceDenied));
    assert_eq!(client.list_namespaces().await.unwrap_err().code, Some(ErrorCode::PermissionDenied));
    let region = open(&guarded, "a").unwrap();
    let calls = region.control_calls(0, kvd_client::RegionSlice { offset: 4096, bytes: 8192 });
    let models = tokio::task::block_in_place(|| calls.server_info());
    assert_eq!(models.unwrap().boot_id, region.boot_id());
    let refused = open(&guarded, "b").unwrap_err();
    assert!(refused.to_string().contains("NAMESPACE_DENIED"), "{refused}");
    guarded.running.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unlisted_user_is_refused_at_every_socket() {
    let guarded = Guarded::start(&of_user(own_uid() + 1, &["use"]), &[]).await;
    let client = client(&guarded).await;
    let refused = client.list_models().await.unwrap_err();
    assert_eq!(refused.code, Some(ErrorCode::Unauthenticated));
    assert!(refused.message.contains(&format!("uid {}", own_uid())), "{refused}");
    assert!(client.is_serving().await.unwrap(), "health is open");
    let refused = open(&guarded, "a").unwrap_err();
    assert!(refused.to_string().contains("UNAUTHENTICATED"), "{refused}");
    guarded.running.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_region_that_is_open_ends_with_its_right() {
    let guarded = Guarded::start(&of_user(own_uid(), &["use"]), &[]).await;
    let region = open(&guarded, "a").unwrap();
    let calls = region.control_calls(0, kvd_client::RegionSlice { offset: 4096, bytes: 8192 });
    let held =
        |name: &str| tokio::task::block_in_place(|| calls.hold_session(SessionOptions::new(name)));
    let attend = || {
        let batch = AttendBatch {
            model: ModelId(1),
            layer: LayerIndex(0),
            q_heads: 1,
            dtype: DType::F32,
            scale: None,
            soft_cap: None,
            queries: vec![AttendQuery::new(SequenceId(1), 1)],
            q: vec![0; 256].into(),
            per_query_errors: false,
        };
        tokio::task::block_in_place(|| region.attend_once(batch, [64, 64])).unwrap_err().code
    };
    assert_eq!(attend(), Some(ErrorCode::UnknownModel));
    held("first").unwrap();
    std::fs::write(guarded.path("principals.toml"), of_user(own_uid(), &["operate"])).unwrap();
    guarded.running.file_reload().notify_one();
    let ok = "kvd_file_reloads_total{files=\"principals\",result=\"ok\"} 1";
    super::support::until(|| guarded.metrics().contains(ok)).await;
    let refused = held("second").map(drop).unwrap_err();
    assert_eq!(refused.code, Some(ErrorCode::PermissionDenied));
    assert_eq!(attend(), Some(ErrorCode::PermissionDenied));
    guarded.running.drain().await;
}
