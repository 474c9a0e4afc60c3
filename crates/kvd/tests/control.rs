//! Rpcs through a region: answers and refusals as by gRPC, sessions that a region holds, and
//! workers that ask for what cannot be.
#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "a test may fail")]

mod support;

use kvd::RunningDaemon;
use kvd_client::{
    Client, ClientError, ControlCalls, ErrorCode, ModelSpec, Namespace, RegionClient,
    RegionOptions, RegionSlice, SequenceFork, SequenceId, SessionOptions,
};
use kvd_proto::v1;
use kvd_testkit::calls::CallShape;
use prost::Message;
use std::path::PathBuf;
use std::time::Duration;
use support::{occupy, start, until};

/// Bytes of the regions of these tests.
const REGION_BYTES: u64 = 1 << 20;
/// Where completion records and answers of control calls are.
const DONE: u64 = REGION_BYTES - 65_536 - 256;
const ROOM: RegionSlice = RegionSlice { offset: REGION_BYTES - 65_536, bytes: 65_536 };

struct Host {
    running: RunningDaemon,
    path: PathBuf,
    _dir: tempfile::TempDir,
}

impl Host {
    async fn start(flags: &[(&str, &str)]) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("region");
        let text = path.display().to_string();
        let flags: Vec<_> =
            flags.iter().copied().chain([("server.listen_region", &text[..])]).collect();
        Self { running: start(&flags).await, path, _dir: dir }
    }

    fn open(&self) -> RegionClient {
        self.open_with(|options| options).expect("a region")
    }

    fn open_with(
        &self,
        change: impl FnOnce(RegionOptions) -> RegionOptions,
    ) -> Result<RegionClient, ClientError> {
        let options = change(RegionOptions::default().with_bytes(REGION_BYTES));
        blocking(|| RegionClient::open_region(&self.path, &options))
    }

    async fn client(&self) -> Client {
        let address = self.running.bound_addresses().tcp.expect("a TCP listener");
        Client::connect(format!("http://{address}").parse().expect("an endpoint")).await.unwrap()
    }
}

/// Calls that block, beside a daemon in this process.
fn blocking<T>(call: impl FnOnce() -> T) -> T {
    tokio::task::block_in_place(call)
}

fn control(region: &RegionClient) -> ControlCalls<'_> {
    region.control_calls(DONE, ROOM)
}

fn shape() -> CallShape {
    CallShape { kv_heads: 2, q_heads: 4, dim: 64, block_tokens: 64, dtype: kvd_client::DType::F16 }
}

fn spec(name: &str) -> ModelSpec {
    shape().model_spec(name, "raw")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_worker_with_a_region_needs_no_other_connection() {
    let host = Host::start(&[]).await;
    let region = host.open();
    let calls = control(&region);
    let info = blocking(|| calls.server_info()).unwrap();
    assert_eq!(info.boot_id, region.boot_id());
    let model = blocking(|| calls.register_model(spec("m"))).unwrap().model;
    let sequence = blocking(|| calls.open_sequence(model, None)).unwrap();
    let chunk = shape().store_chunk(sequence, 1, 0, 100);
    assert_eq!(blocking(|| region.store_once(chunk)).unwrap().length, 100);
    let batch = shape().attend_batch(model, &[sequence]);
    let attended = blocking(|| region.attend_once(batch.clone(), [64, 64])).unwrap();
    let client = host.client().await;
    assert_eq!(client.attend_batch(batch).await.unwrap(), attended);
    let fork = SequenceFork { sequence, length: Some(70), session: None };
    let forked = blocking(|| calls.fork_sequence(fork)).unwrap();
    assert_eq!(forked.length, 70);
    blocking(|| calls.truncate_sequence(forked.sequence, 30)).unwrap();
    let described = blocking(|| calls.describe_sequence(forked.sequence)).unwrap();
    assert_eq!(described, client.describe_sequence(forked.sequence).await.unwrap());
    assert_eq!(described.length, 30);
    blocking(|| calls.close_sequence(forked.sequence)).unwrap();
    let gone = blocking(|| calls.describe_sequence(forked.sequence)).unwrap_err();
    assert_eq!(gone, client.describe_sequence(forked.sequence).await.unwrap_err());
    assert_eq!(gone.code, Some(ErrorCode::UnknownSequence));
    // Counted under the names of their rpcs.
    let page = host.running.service().metrics().render_page();
    assert!(page.contains("kvd_requests_total{rpc=\"OpenSequence\",code=\"OK\"} 1"), "{page}");
    host.running.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_attend_by_control_answers_as_by_grpc() {
    let host = Host::start(&[]).await;
    let region = host.open();
    let client = host.client().await;
    let model = client.register_model(spec("m")).await.unwrap().model;
    let sequence = client.open_sequence(model).await.unwrap();
    client.store_chunk(shape().store_chunk(sequence, 1, 0, 100)).await.unwrap();
    let batch = shape().attend_batch(model, &[sequence]);
    let right = client.attend_batch(batch.clone()).await.unwrap();
    let request = v1::AttendRequest::from(batch);
    let answer: v1::AttendResponse =
        blocking(|| control(&region).call_rpc("Attend", &request)).unwrap();
    assert_eq!(answer, v1::AttendResponse::from(right));
    host.running.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_end_of_a_region_ends_the_sessions_that_it_alone_holds() {
    let host = Host::start(&[]).await;
    let client = host.client().await;
    let model = client.register_model(spec("m")).await.unwrap().model;
    let region = host.open();
    let session = blocking(|| control(&region).hold_session(SessionOptions::new("worker")));
    let session = session.unwrap();
    let owned = blocking(|| control(&region).open_sequence(model, Some(session.id))).unwrap();
    let free = blocking(|| control(&region).open_sequence(model, None)).unwrap();
    let listed = client.list_sessions().await.unwrap();
    assert_eq!((listed[0].holders, listed[0].sequences), (1, 1));
    assert!(listed[0].peer.starts_with("region, process "), "{}", listed[0].peer);
    // A second name, and the same one again, which is in use.
    let used = blocking(|| control(&region).hold_session(SessionOptions::new("worker")));
    assert_eq!(used.unwrap_err().code, Some(ErrorCode::InvalidArgument));
    drop(region);
    let service = host.running.service().clone();
    let default = Namespace::new("default").unwrap();
    let call = kvd::service::CallContext::new(default);
    until(|| service.list_sessions(&call).unwrap().is_empty()).await;
    // Its sequences are closed after it has left the list.
    let mut described = client.describe_sequence(owned).await;
    for _ in 0..1000 {
        if described.is_err() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
        described = client.describe_sequence(owned).await;
    }
    assert_eq!(described.unwrap_err().code, Some(ErrorCode::UnknownSequence));
    client.describe_sequence(free).await.unwrap();
    host.running.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_is_taken_over_is_unknown_to_its_region() {
    let host = Host::start(&[]).await;
    let (old, new) = (host.open(), host.open());
    let model = blocking(|| control(&old).register_model(spec("m"))).unwrap().model;
    let hold = |region| blocking(|| control(region).hold_session(SessionOptions::new("w")));
    let first = hold(&old).unwrap();
    let taken = SessionOptions::new("w").with_take_over();
    let second = blocking(|| control(&new).hold_session(taken)).unwrap();
    assert_ne!(first.id, second.id);
    let late = blocking(|| control(&old).open_sequence(model, Some(first.id))).unwrap_err();
    assert_eq!(late.code, Some(ErrorCode::UnknownSession));
    // The old one's end is no end of the new one's session.
    drop(old);
    tokio::time::sleep(Duration::from_millis(50)).await;
    blocking(|| control(&new).open_sequence(model, Some(second.id))).unwrap();
    assert_eq!(blocking(|| control(&new).close_session(second.id)).unwrap(), 1);
    host.running.drain().await;
}

/// The refusal of a control call as it stands.
fn refusal(region: &RegionClient, call: v1::RegionControl) -> ClientError {
    blocking(|| {
        region.send_control(DONE, call)?;
        region.wait_call(DONE)
    })
    .expect_err("a refusal")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_that_cannot_be_are_refused_and_the_region_goes_on() {
    let host = Host::start(&[
        ("server.message_bytes_max", "256 KiB"),
        ("limits.calibration_bytes_max", "64 KiB"),
    ])
    .await;
    let region = host.open();
    let inline = |bytes: Vec<u8>| kvd_proto::domain::inline_payload(bytes.into());
    let in_region = |offset, bytes| v1::Payload {
        source: Some(v1::payload::Source::Region(RegionSlice { offset, bytes })),
    };
    let good = v1::RegionControl {
        method: "ListModels".to_owned(),
        request: Some(inline(Vec::new())),
        answer: Some(ROOM),
    };
    let with_method =
        |method: &str| v1::RegionControl { method: method.to_owned(), ..good.clone() };
    let with_request = |request| v1::RegionControl { request: Some(request), ..good.clone() };
    let with_answer = |answer| v1::RegionControl { answer, ..good.clone() };
    let slice = |offset, bytes| Some(RegionSlice { offset, bytes });
    use ErrorCode::{InvalidArgument, MessageTooLarge};
    let cases = [
        (with_method(""), InvalidArgument, "is no rpc of kvd.v1.Kvd"),
        (with_method(&"x".repeat(100_000)), InvalidArgument, "is no rpc"),
        (with_method("listmodels"), InvalidArgument, "is no rpc"),
        (with_method("../grpc.health.v1.Health/Check"), InvalidArgument, "is no rpc"),
        (with_method("ListModels\r\nkvd-namespace: other"), InvalidArgument, "is no rpc"),
        (with_method("StoreBlocks"), InvalidArgument, "StoreBlocks is a stream"),
        (with_method("LoadBlocks"), InvalidArgument, "LoadBlocks is a stream"),
        (with_request(inline(vec![0xff; 10])), InvalidArgument, ""),
        (with_request(in_region(REGION_BYTES - 3, 4)), InvalidArgument, "not inside the region"),
        (with_request(in_region(u64::MAX, u64::MAX)), InvalidArgument, "not inside the region"),
        (with_request(in_region(0, 300 << 10)), MessageTooLarge, "server.message_bytes_max"),
        (with_answer(None), InvalidArgument, "answer is missing"),
        (with_answer(slice(0, 4095)), InvalidArgument, "it needs 4096"),
        (with_answer(slice(REGION_BYTES - 4095, 4096)), InvalidArgument, "not inside the region"),
        (with_answer(slice(u64::MAX - 4095, 4096)), InvalidArgument, "not inside the region"),
    ];
    for (call, code, text) in cases {
        let method = call.method.clone();
        let refused = refusal(&region, call);
        assert_eq!(refused.code, Some(code), "{method}: {refused}");
        assert!(refused.message.contains(text), "{method}: {refused}");
    }
    // A hold that is none.
    let hold = v1::HoldSessionRequest { name: "a b".to_owned(), ..Default::default() };
    let call = v1::RegionControl {
        request: Some(inline(hold.encode_to_vec())),
        ..with_method("HoldSession")
    };
    assert!(refusal(&region, call).message.starts_with("name: must be"));
    let none: v1::ListModelsResponse =
        blocking(|| control(&region).call_rpc("ListModels", &v1::ListModelsRequest {})).unwrap();
    assert!(none.models.is_empty());
    let page = host.running.service().metrics().render_page();
    let counted = "kvd_requests_total{rpc=\"ControlRegion\",code=\"INVALID_ARGUMENT\"}";
    assert!(page.contains(counted), "{page}");
    host.running.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_that_does_not_fit_says_how_much_room_it_takes() {
    let host = Host::start(&[]).await;
    let region = host.open();
    for index in 0..40 {
        let name = format!("{}-{index}", "m".repeat(100));
        blocking(|| control(&region).register_model(spec(&name))).unwrap();
    }
    let small = region.control_calls(DONE, RegionSlice { bytes: 4096, ..ROOM });
    let ask = |calls: ControlCalls<'_>| {
        blocking(|| {
            calls.call_rpc::<v1::ListModelsResponse>("ListModels", &v1::ListModelsRequest {})
        })
    };
    let refused = ask(small).unwrap_err();
    assert_eq!(refused.code, Some(ErrorCode::MessageTooLarge));
    let listed = ask(control(&region)).unwrap();
    assert_eq!(listed.models.len(), 40);
    let takes = format!("takes {} bytes", listed.encoded_len());
    assert!(refused.message.contains(&takes), "{refused}");
    host.running.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn errors_keep_what_a_status_says() {
    let host = Host::start(&[]).await;
    let region = host.open();
    // An id of another boot, by a control and by a store.
    let own = u32::from_str_radix(&region.boot_id()[..8], 16).unwrap();
    let old = SequenceId(u64::from(own ^ 1) << 32 | 5);
    let restarted = blocking(|| control(&region).describe_sequence(old)).unwrap_err().restarted;
    let restarted = restarted.expect("a restart");
    assert_eq!((restarted.old, &restarted.new[..]), (format!("{:08x}", own ^ 1), region.boot_id()));
    let stored = blocking(|| region.store_once(shape().store_chunk(old, 1, 0, 1))).unwrap_err();
    assert_eq!(stored.restarted.expect("a restart").old, format!("{:08x}", own ^ 1));
    // A long message is whole, though its record cuts it.
    let bad = ModelSpec { codec: "x".repeat(1000), ..spec("m") };
    let by_region = blocking(|| control(&region).register_model(bad.clone())).unwrap_err();
    assert_eq!(by_region, host.client().await.register_model(bad).await.unwrap_err());
    // A calibration that no message of the socket takes travels through the room.
    let large = ModelSpec { calibration: vec![7; 50_000].into(), ..spec("m") };
    let large = ModelSpec { name: "n".repeat(300_000), ..large };
    let roomy = region.control_calls(DONE, RegionSlice { offset: 0, bytes: DONE });
    let by_region = blocking(|| roomy.register_model(large.clone())).unwrap_err();
    assert_eq!(by_region, host.client().await.register_model(large).await.unwrap_err());
    host.running.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deadlines_and_namespaces_are_those_of_the_region() {
    let host = Host::start(&[]).await;
    let other = Namespace::new("other").unwrap();
    let denied = host.open_with(|options| options.with_namespace(&other)).unwrap_err();
    assert_eq!(denied.code, Some(ErrorCode::NamespaceDenied));
    let hurried =
        host.open_with(|options| options.with_timeout(Duration::from_millis(100))).unwrap();
    let held = occupy(&host.running).await;
    // Registering asks the device, which is busy.
    let late = blocking(|| control(&hurried).register_model(spec("m"))).unwrap_err();
    assert_eq!(late.code, Some(ErrorCode::DeadlineExceeded));
    drop(held);
    host.running.drain().await;
}
