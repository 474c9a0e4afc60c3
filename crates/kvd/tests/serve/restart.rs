//! A daemon that is killed and started again: what its engines hold of it means nothing any more.

use super::process::Process;
use super::{assert_serves, batch, chunk, model};
use kvd_client::{
    Client, ClientError, ErrorCode, LayerIndex, LoadRange, RegionClient, RegionOptions,
    SequencePhase,
};
use std::path::Path;

/// That a call failed for an id of the boot `old`.
fn assert_stale<T: std::fmt::Debug>(
    what: &str,
    code: ErrorCode,
    answer: Result<T, ClientError>,
    [old, new]: [&str; 2],
) {
    let error = answer.expect_err(what);
    assert_eq!(error.code, Some(code), "{what}: {error}");
    assert!(!error.is_retryable(), "{what}: {error}");
    // Whole, also in the record of a region.
    assert!(error.message.contains("restarted"), "{what}: {error}");
    assert!(error.message.ends_with("open a sequence and store again"), "{what}: {error}");
    let restarted = error.restarted.unwrap_or_else(|| panic!("{what} is no restart"));
    assert!(old.starts_with(&restarted.old) && restarted.old.len() >= 8, "{what}: {restarted:?}");
    assert_eq!(restarted.new, new, "{what}");
}

/// A daemon on that port, with regions at that path.
fn start(tcp: &str, regions: &Path) -> Process {
    let (tcp, regions) =
        (format!("server.listen_tcp={tcp}"), format!("server.listen_region={}", regions.display()));
    Process::start(&["--set", &tcp, "--set", &regions])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn old_ids_reach_nothing_of_the_next_boot() {
    let folder = tempfile::tempdir().unwrap();
    let regions = folder.path().join("regions.sock");
    let first = start("127.0.0.1:0", &regions);
    let port = first.tcp().to_owned();
    let a = first.client().await;
    let old = a.server_info().await.unwrap().boot_id;
    let (a_model, a_sequence) = assert_serves(&a).await;
    first.signal("KILL");
    assert_eq!(first.wait().code, None);

    let second = start(&port, &regions);
    let b = second.client().await;
    let new = b.server_info().await.unwrap().boot_id;
    assert_eq!((old.len(), new.len()), (32, 32));
    assert_ne!(old, new);
    let (b_model, b_sequence) = assert_serves(&b).await;
    assert!(b_model != a_model && b_sequence != a_sequence);
    let before = b.describe_sequence(b_sequence).await.unwrap();

    // A's connection is made anew by its next call; every one of its old ids is refused.
    let boots = [&old[..], &new[..]];
    let unknown = ErrorCode::UnknownSequence;
    assert_stale("attend", unknown, a.attend_batch(batch(a_model, a_sequence)).await, boots);
    assert_stale("store", unknown, a.store_chunk(chunk(a_sequence, 100, 1)).await, boots);
    assert_stale("close", unknown, a.close_sequence(a_sequence).await, boots);
    assert_stale("describe", unknown, a.describe_sequence(a_sequence).await, boots);
    assert_stale("fork", unknown, a.fork_sequence(a_sequence, None).await, boots);
    let hinted = a.hint_sequence(a_sequence, SequencePhase::Done, None).await;
    assert_stale("hint", unknown, hinted, boots);
    assert_stale("truncate", unknown, a.truncate_sequence(a_sequence, 0).await, boots);
    let range =
        LoadRange { sequence: a_sequence, layer: LayerIndex(0), start: 0, end: 9, dtype: None };
    assert_stale("load", unknown, a.load_rows(range).await, boots);
    let mut stream = a.attend_stream(1).await.unwrap();
    let answer = stream.attend_batch(batch(a_model, a_sequence)).await;
    assert_stale("attend by a stream", unknown, answer, boots);
    let mut stream = a.store_stream(1).await.unwrap();
    stream.send_chunk(chunk(a_sequence, 100, 1)).await.unwrap();
    assert_stale("store by a stream", unknown, stream.receive_ack().await, boots);
    // New sequences of an old model, and old sequences under the new model.
    let unknown_model = ErrorCode::UnknownModel;
    assert_stale("open", unknown_model, a.open_sequence(a_model).await, boots);
    assert_stale("describe model", unknown_model, a.describe_model(a_model).await, boots);
    assert_stale("unregister", unknown_model, a.unregister_model(a_model).await, boots);
    assert_stale("sample", unknown_model, a.sample_queries(a_model, LayerIndex(0)).await, boots);
    assert_stale(
        "attend with b's model",
        unknown,
        a.attend_batch(batch(b_model, a_sequence)).await,
        boots,
    );
    in_regions(&regions, &a, (a_model, a_sequence), boots);

    // Nothing of it touched b.
    assert_eq!(b.describe_sequence(b_sequence).await.unwrap(), before);
    let attended = b.attend_batch(batch(b_model, b_sequence)).await.unwrap();
    assert_eq!(attended.out[..], 1f32.to_le_bytes().repeat(64));
    // And a goes on by registering again, which is b's model: the same content.
    assert_eq!(model(&a).await, b_model);
    let again = a.open_sequence(b_model).await.unwrap();
    a.store_chunk(chunk(again, 0, 10)).await.unwrap();
}

/// Restarts as above, through memory that is shared with the new boot.
fn in_regions(
    path: &Path,
    client: &Client,
    (model, sequence): (kvd_client::ModelId, kvd_client::SequenceId),
    boots: [&str; 2],
) {
    let region = RegionClient::open_region(path, &RegionOptions::default()).expect("a region");
    let unknown = ErrorCode::UnknownSequence;
    let attended = region.attend_once(batch(model, sequence), [64, 64]);
    assert_stale("attend by a region", unknown, attended, boots);
    assert_stale("store by a region", unknown, region.store_once(chunk(sequence, 100, 1)), boots);
    // A region that must be of the boot whose ids will be used in it.
    let options = RegionOptions::default().with_boot_id(boots[0]);
    let restarted =
        RegionClient::open_region(path, &options).expect_err("stale").restarted.expect("a restart");
    assert_eq!([&restarted.old[..], &restarted.new[..]], boots);
    let known = client.boot_id().expect("told by the refusals");
    RegionClient::open_region(path, &RegionOptions::default().with_boot_id(known))
        .expect("a region");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_is_told_once_that_the_daemon_was_restarted() {
    let folder = tempfile::tempdir().unwrap();
    let first = start("127.0.0.1:0", &folder.path().join("regions.sock"));
    let port = first.tcp().to_owned();
    let client = first.client().await;
    let old = client.server_info().await.unwrap().boot_id;
    first.signal("KILL");
    first.wait();
    let second = start(&port, &folder.path().join("regions.sock"));
    let error = client.server_info().await.unwrap_err();
    let restarted = error.restarted.clone().unwrap_or_else(|| panic!("{error}"));
    assert_eq!(restarted.old, old);
    let info = client.server_info().await.unwrap();
    assert_eq!(restarted.new, info.boot_id);
    assert_eq!(client.stats().await.unwrap().boot_id, info.boot_id);
    drop(second);
}
