//! Limits of attends and stores, and what goes on beside a busy device.

use super::bench::{Bench, call, chunk};
use crate::service::attend::{ResolvedReads, plan_queries};
use crate::service::attend_shelf::AttendShelf;
use bytes::Bytes;
use kvd_core::{DType, ErrorCode, LayerIndex, ModelId, SequenceId};
use kvd_proto::domain::{AttendBatch, AttendQuery, LoadRange, StoreChunk};
use std::sync::Arc;
use std::time::Duration;

fn batch(model: ModelId, queries: Vec<AttendQuery>) -> AttendBatch {
    let rows: u32 = queries.iter().map(|query| query.n_q).sum();
    AttendBatch {
        model,
        layer: LayerIndex(0),
        q_heads: 1,
        dtype: DType::F32,
        scale: None,
        soft_cap: None,
        queries,
        q: Bytes::from(vec![0; rows as usize * 8 * 4]),
        per_query_errors: false,
    }
}

/// A model with a sequence of ten blocks.
async fn ten_blocks(bench: &Bench) -> (ModelId, SequenceId) {
    let model = bench.register("a", "raw").await.shape.id;
    let sequence = bench.service.open_sequence(&call(), model).unwrap();
    bench.store(sequence, 0, 160).await.unwrap();
    (model, sequence)
}

#[tokio::test]
async fn queries_of_the_same_range_are_planned_once() {
    let bench = Bench::new(1 << 16, &[]);
    let (model, sequence) = ten_blocks(&bench).await;
    let all = AttendQuery::new(sequence, 1);
    let some = AttendQuery { end: Some(40), ..all };
    let windowed = AttendQuery { sliding_window: Some(4), ..all };
    let batch = batch(model, vec![all, some, windowed, all]);
    let model = bench.service.find_model(&call(), model).unwrap();
    let ResolvedReads { reads, pins, query_errors } =
        bench.service.resolve_reads(&call(), &model, &batch).unwrap();
    assert_eq!(bench.service.check_work(&batch, &reads, 16).unwrap(), 10 + 3 + 1);
    let queries = plan_queries(&batch, &reads, &pins, &AttendShelf::default());
    assert_eq!((pins.read_count(), query_errors.len()), (3, 0));
    assert!(Arc::ptr_eq(&queries[0].parts, &queries[3].parts));
    assert_eq!(queries.iter().map(|query| query.tokens()).collect::<Vec<_>>(), [160, 40, 4, 160]);
    let reply = bench.service.attend_batch(&call(), batch).await.unwrap();
    assert_eq!(reply.lse.len(), 4);
    assert_eq!((reply.lse[0], reply.lse[2]), (160f32.ln(), 4f32.ln()));
}

#[tokio::test]
async fn an_attend_over_too_many_blocks_or_scores_is_refused_before_it_is_planned() {
    let settings = [("limits.attend_parts_max", "25"), ("limits.attend_work_max", "400")];
    let bench = Bench::new(1 << 16, &settings);
    let (model, sequence) = ten_blocks(&bench).await;
    let query = |n_q| AttendQuery::new(sequence, n_q);
    let call = call();
    let ask = |queries| bench.service.attend_batch(&call, batch(model, queries));
    ask(vec![query(1), query(1)]).await.unwrap();
    let error = ask(vec![query(1); 3]).await.err().unwrap();
    assert_eq!(error.code(), ErrorCode::LimitExceeded);
    assert!(error.to_string().contains("30 blocks to read, over limits.attend_parts_max = 25"));
    let error = ask(vec![query(3)]).await.err().unwrap();
    assert_eq!(error.code(), ErrorCode::LimitExceeded);
    assert!(error.to_string().contains("480 scores to compute, over limits.attend_work_max"));
    // A window bounds what is computed.
    ask(vec![AttendQuery { sliding_window: Some(20), ..query(3) }]).await.unwrap();
}

#[tokio::test]
async fn a_long_prefill_is_within_the_defaults() {
    let bench = Bench::new(1 << 16, &[]);
    let config = bench.service.config();
    assert!(2048 * 131_072 * 32 * 2 <= config.attend_work_max);
    // 256 sequences of 131072 tokens in blocks of 64.
    assert!(256 * (131_072 / 64) <= config.attend_parts_max);
}

#[tokio::test]
async fn bytes_in_flight_are_bounded_and_given_back() {
    let settings = [
        ("server.message_bytes_max", "16 KiB"),
        ("limits.calibration_bytes_max", "16 KiB"),
        ("limits.attend_parts_max", "64"),
        ("limits.inflight_bytes_max", "40 KiB"),
    ];
    let bench = Bench::new(1 << 20, &settings);
    let model = bench.register("a", "raw").await.shape.id;
    let open = || bench.service.open_sequence(&call(), model).unwrap();
    let sequences = [open(), open(), open()];
    let release = bench.hold().await;
    // 512 tokens of 32 bytes.
    let store = |sequence| {
        let (service, chunk) = (bench.service.clone(), chunk(sequence, 0, 512));
        tokio::spawn(async move { service.store_chunk(&call(), chunk).await })
    };
    let waiting = [store(sequences[0]), store(sequences[1])];
    bench.queued(2).await;
    let refused = bench.store(sequences[2], 0, 512).await.unwrap_err();
    assert_eq!(refused.code(), ErrorCode::QueueFull);
    assert!(refused.to_string().contains("limits.inflight_bytes_max"), "{refused}");
    let large = AttendBatch {
        q: Bytes::from(vec![0; 300 * 32]),
        ..batch(
            model,
            vec![AttendQuery { position: Some(0), ..AttendQuery::new(sequences[2], 300) }],
        )
    };
    let refused = bench.service.attend_batch(&call(), large).await.err().unwrap();
    assert_eq!(refused.code(), ErrorCode::QueueFull);
    bench.store(sequences[2], 0, 512).await.unwrap_err();
    // What no one would find is not looked for.
    let refused = bench.store(SequenceId(1 << 40), 0, 512).await.unwrap_err();
    assert_eq!(refused.code(), ErrorCode::QueueFull);
    drop(release);
    for stored in waiting {
        stored.await.unwrap().unwrap();
    }
    bench.store(sequences[2], 0, 512).await.unwrap();
}

#[tokio::test]
async fn statistics_do_not_wait_for_the_device() {
    let bench = Bench::new(1 << 20, &[]);
    let model = bench.register("a", "kvcomp").await;
    let sequence = bench.service.open_sequence(&call(), model.shape.id).unwrap();
    // Small values are frequent, so a table of its own is worth having.
    let values: Vec<f32> = (0..1600 * 8).map(|i| ((i * 7 % 61) as f32 / 61.0).powi(6)).collect();
    let mut bytes = vec![0; values.len() * 2];
    DType::F16.narrow_values(&values, &mut bytes);
    let rows = Bytes::from(bytes);
    let skewed = StoreChunk { k: rows.clone(), v: rows, ..chunk(sequence, 0, 1600) };
    bench.service.store_chunk(&call(), skewed).await.unwrap();
    let _held = bench.hold().await;
    let answer = async {
        bench.service.refresh_gauges();
        bench.service.model_stats(&call(), model.clone()).unwrap()
    };
    let stats = tokio::time::timeout(Duration::from_secs(10), answer).await.expect("an answer");
    assert!(stats.once.tables > 0);
    assert_eq!(stats.once.calibration, 0);
    let gauge = "kvd_model_once_bytes{namespace=\"default\",model=\"a\",codec=\"kvcomp\",\
                 part=\"tables\"}";
    let sample = format!("{gauge} {}\n", stats.once.tables);
    assert!(bench.service.metrics().render_page().contains(&sample), "{sample}");
}

#[tokio::test]
async fn a_load_that_was_let_in_is_finished_during_a_drain() {
    let bench = Bench::new(1 << 16, &[]);
    let (_, sequence) = ten_blocks(&bench).await;
    let range = LoadRange { sequence, layer: LayerIndex(0), start: 0, end: 160, dtype: None };
    let pieces = bench.service.load_pieces(&call(), &range).unwrap();
    bench.service.drain();
    for piece in &pieces {
        bench.service.load_piece(&call(), piece).await.unwrap();
    }
    let refused = bench.service.load_pieces(&call(), &range).unwrap_err();
    assert_eq!(refused.code(), ErrorCode::ShuttingDown);
}
