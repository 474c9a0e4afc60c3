//! Answers in the form that an engine takes, and what a daemon tells an engine of itself.
#![cfg(target_os = "linux")]
#![expect(clippy::unwrap_used, reason = "a test may fail")]

mod support;

use kvd::RunningDaemon;
use kvd_client::{
    AnswerForm, AttendBatch, AttendLayout, AttendQuery, Client, ClientError, DType, ErrorCode,
    LseBase, LseOrder, ModelSpec, RegionClient, RegionOptions,
};
use kvd_proto::v1::{self, kvd_client::KvdClient};
use kvd_testkit::calls::{CallShape, read_floats};
use support::{rpc, start};
use tonic::transport::Channel;

fn shape() -> CallShape {
    CallShape { kv_heads: 2, q_heads: 4, dim: 64, block_tokens: 64, dtype: DType::F16 }
}

/// Calls that block, beside a daemon in this process.
fn blocking<T>(call: impl FnOnce() -> T) -> T {
    tokio::task::block_in_place(call)
}

struct Host {
    running: RunningDaemon,
    client: Client,
    rpc: KvdClient<Channel>,
    region: RegionClient,
    dir: tempfile::TempDir,
}

impl Host {
    async fn start() -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("region");
        let running = start(&[("server.listen_region", &path.display().to_string())]).await;
        let address = running.bound_addresses().tcp.expect("a TCP listener");
        let endpoint = format!("http://{address}").parse().expect("an endpoint");
        let client = Client::connect(endpoint).await.expect("a client");
        let rpc = rpc(&running).await;
        let options = RegionOptions::default().with_bytes(1 << 20);
        let region = blocking(|| RegionClient::open_region(&path, &options)).expect("a region");
        Self { running, client, rpc, region, dir }
    }

    /// Two sequences, of 100 and 70 tokens, and queries of three and one tokens over them.
    async fn stored_batch(&self, dtype: DType) -> AttendBatch {
        let model = self.client.register_model(shape().model_spec("m", "raw")).await.unwrap().model;
        let mut sequences = Vec::new();
        for (seed, tokens) in [(1, 100), (2, 70)] {
            let sequence = self.client.open_sequence(model).await.unwrap();
            self.client.store_chunk(shape().store_chunk(sequence, seed, 0, tokens)).await.unwrap();
            sequences.push(sequence);
        }
        let batch = shape().attend_batch(model, &[sequences[0]; 4]);
        let queries = vec![AttendQuery::new(sequences[0], 3), AttendQuery::new(sequences[1], 1)];
        let mut q = vec![0; batch.q.len() / 4 * dtype.size_bytes()];
        dtype.narrow_values(&read_floats(&batch.q), &mut q);
        AttendBatch { queries, dtype, q: q.into(), ..batch }
    }

    /// Attends through the region in a form of the caller's; `out` and `lse`.
    fn attend_region(
        &self,
        batch: AttendBatch,
        form: AnswerForm,
    ) -> Result<(Vec<u8>, Vec<f32>), ClientError> {
        let at = AttendLayout::pack_formed(0, &batch, form, [64, 64]);
        blocking(|| {
            let memory = self.region.memory();
            memory.write_bytes(at.q.offset, &batch.q).expect("inside");
            self.region.send_attend_formed(batch, form, at)?;
            self.region.wait_call(at.done)?;
            let mut out = vec![0; at.out.bytes as usize];
            memory.read_bytes(at.out.offset, &mut out).expect("inside");
            let mut lse = vec![0; at.lse.bytes as usize];
            memory.read_bytes(at.lse.offset, &mut lse).expect("inside");
            Ok((out, read_floats(&lse)))
        })
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_come_in_the_form_that_is_asked_for() {
    let host = Host::start().await;
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let batch = host.stored_batch(dtype).await;
        // Queries in f32 are those in the narrower dtype, exactly.
        let mut q = vec![0f32; batch.q.len() / dtype.size_bytes()];
        dtype.widen_values(&batch.q, &mut q);
        let q: Vec<u8> = q.into_iter().flat_map(f32::to_le_bytes).collect();
        let wide = AttendBatch { dtype: DType::F32, q: q.into(), ..batch.clone() };
        let right = host.client.attend_batch(wide).await.unwrap();
        let usual = host.client.attend_batch(batch.clone()).await.unwrap();
        for out_dtype in [None, Some(DType::F32), Some(DType::F16), Some(DType::BF16)] {
            for (lse_base, lse_order) in [
                (LseBase::Natural, LseOrder::TokensHeads),
                (LseBase::Two, LseOrder::HeadsTokens),
                (LseBase::Two, LseOrder::TokensHeads),
            ] {
                let form = AnswerForm { out_dtype, lse_base, lse_order };
                let by_grpc = host.client.attend_formed(batch.clone(), form).await.unwrap();
                let (out, lse) = host.attend_region(batch.clone(), form).unwrap();
                assert!(out == by_grpc.out && lse == by_grpc.lse, "{dtype:?} {form:?}");
                // Another dtype is computed in f32; the same stays what it was.
                let to = form.out_dtype_for(dtype);
                let source = if to == dtype { &usual } else { &right };
                if to == dtype {
                    assert_eq!(out, source.out, "{dtype:?} {form:?}");
                } else {
                    let mut narrow = vec![0; right.out.len() / 4 * to.size_bytes()];
                    to.narrow_values(&read_floats(&right.out), &mut narrow);
                    assert_eq!(out, narrow, "{dtype:?} {form:?}");
                }
                let wanted = (0..16).map(|at| match lse_order {
                    LseOrder::TokensHeads => source.lse[at],
                    LseOrder::HeadsTokens => source.lse[at % 4 * 4 + at / 4],
                });
                let wanted = wanted.map(|lse| match lse_base {
                    LseBase::Natural => lse,
                    LseBase::Two => lse * std::f32::consts::LOG2_E,
                });
                assert_eq!(lse, wanted.collect::<Vec<_>>(), "{dtype:?} {form:?}");
            }
        }
    }
    host.running.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_visible_is_a_position_past_the_end() {
    let host = Host::start().await;
    let mut rpc = host.rpc.clone();
    let batch = host.stored_batch(DType::F32).await;
    let past = |query: &AttendQuery| AttendQuery { position: Some(1000), ..*query };
    let queries = batch.queries.iter().map(past).collect();
    let right = host.client.attend_batch(AttendBatch { queries, ..batch.clone() }).await.unwrap();
    let asked = v1::AttendRequest { all_visible: true, ..batch.clone().into() };
    let answer = rpc.attend(asked.clone()).await.unwrap().into_inner();
    assert_eq!(answer, v1::AttendResponse::from(right.clone()));
    // More query tokens than are stored, by the client's own word for it.
    let queries = batch.queries.iter().map(|query| query.with_all_visible()).collect();
    let by_client = AttendBatch { queries, ..batch.clone() };
    assert_eq!(host.client.attend_batch(by_client).await.unwrap(), right);
    let bounded = |kv_length| {
        let mut asked = asked.clone();
        asked.queries[0].kv_length = Some(kv_length);
        asked
    };
    rpc.attend(bounded(2)).await.expect("three query tokens over two");
    // What contradicts it.
    for change in [
        |query: &mut v1::Query| query.position = Some(5),
        |query: &mut v1::Query| query.sliding_window = 5,
    ] {
        let mut bad = asked.clone();
        change(&mut bad.queries[1]);
        let refused = rpc.attend(bad).await.unwrap_err();
        assert_eq!(kvd_proto::error_code(&refused), Some(ErrorCode::InvalidArgument));
        assert!(refused.message().starts_with("queries[1]."), "{refused}");
    }
    for bad in [
        v1::AttendRequest { lse_base: 7, ..asked.clone() },
        v1::AttendRequest { lse_order: -1, ..asked.clone() },
        v1::AttendRequest { out_dtype: 9, ..asked },
    ] {
        let refused = rpc.attend(bad).await.unwrap_err();
        assert_eq!(kvd_proto::error_code(&refused), Some(ErrorCode::InvalidArgument), "{refused}");
    }
    host.running.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_says_what_an_engine_must_know() {
    let host = Host::start().await;
    let info = host.client.server_info().await.unwrap();
    assert_eq!(info.region_path, host.dir.path().join("region").display().to_string());
    assert_eq!(info.codec_default, "kivi-4");
    assert_eq!(info.limits["limits.step_rows_max"], 4_194_304);
    assert_eq!(info.limits["limits.page_tokens_min"], 64);
    assert_eq!(info.protocol, 1);
    for feature in ["region_control", "steps", "all_visible"] {
        assert!(info.features.iter().any(|named| named == feature), "{feature}");
    }
    // Whatever a list says needs no calibration registers without one, and pages as it says.
    let codecs = host.client.list_codecs().await.unwrap();
    assert!(codecs.iter().any(|codec| codec.name == info.codec_default));
    let shape = CallShape { dim: 128, ..shape() };
    let geometry = shape.model_spec("", "").geometry;
    for codec in &codecs {
        // A name has no plus.
        let name = codec.name.replace('+', "-");
        let spec = ModelSpec { name: name.clone(), ..shape.model_spec("", &codec.name) };
        let registered = host.client.register_model(spec.clone()).await;
        let refused = registered.as_ref().err();
        assert_eq!(refused.is_some(), codec.needs_calibration, "{}: {refused:?}", codec.name);
        if codec.needs_calibration {
            continue;
        }
        assert_eq!(registered.unwrap().codec_spec, codec.spec, "{}", codec.name);
        if codec.page_tokens_min > 1 {
            let block_tokens = codec.page_tokens_min - 1;
            let geometry = kvd_client::Geometry { block_tokens, ..geometry.clone() };
            let name = format!("{name}/small");
            let small = ModelSpec { name, geometry, ..spec };
            let refused = host.client.register_model(small).await.unwrap_err();
            assert!(refused.message.contains("block_tokens"), "{}: {refused}", codec.name);
        }
    }
    let kivi = codecs.iter().find(|codec| codec.name == "kivi-4").unwrap();
    assert!(kivi.bits_k.is_some_and(|bits| (5.0..5.1).contains(&bits)), "{kivi:?}");
    assert_eq!((kivi.sink, kivi.recent), (0, 128));
    host.running.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn windows_of_a_registration_replace_those_of_the_codec() {
    let host = Host::start().await;
    let mut rpc = host.rpc.clone();
    let request = |name: &str, codec: &str, windows: Option<v1::Windows>| {
        let spec = ModelSpec { name: name.to_owned(), ..shape().model_spec("", codec) };
        v1::RegisterModelRequest { windows, ..spec.into() }
    };
    let none = Some(v1::Windows { sink: None, recent: Some(0) });
    let default = rpc.register_model(request("default", "", None)).await.unwrap().into_inner();
    let preset = rpc.register_model(request("preset", "kivi-4", None)).await.unwrap().into_inner();
    assert_eq!(default.codec_spec, preset.codec_spec);
    assert!(preset.codec_spec.contains("recent=128"));
    let bare = rpc.register_model(request("bare", "", none)).await.unwrap().into_inner();
    assert!(!bare.codec_spec.contains("recent"), "{}", bare.codec_spec);
    let both = Some(v1::Windows { sink: Some(4), recent: Some(32) });
    let both = rpc.register_model(request("both", "fp8", both)).await.unwrap().into_inner();
    assert!(both.codec_spec.ends_with("; sink=4; recent=32"), "{}", both.codec_spec);
    // Without a window, what is full is packed at once.
    for (model_id, packed) in [(bare.model_id, 2), (default.model_id, 0)] {
        let model = kvd_client::ModelId(model_id);
        let sequence = host.client.open_sequence(model).await.unwrap();
        host.client.store_chunk(shape().store_chunk(sequence, 1, 0, 130)).await.unwrap();
        let described = host.client.describe_sequence(sequence).await.unwrap();
        assert_eq!(described.packed_blocks, packed);
    }
    // A spec that says its own window is not given another.
    let spec = "k=fp8; v=fp8; recent=64";
    let refused = rpc.register_model(request("twice", spec, none)).await.unwrap_err();
    assert_eq!(kvd_proto::error_code(&refused), Some(ErrorCode::InvalidCodec), "{refused}");
    host.running.drain().await;
}
