//! Single queries of a batch: how much they read, and how they fail.

use super::bench::{Bench, call, spec};
use crate::service::attend::plan_queries;
use crate::service::attend_shelf::AttendShelf;
use bytes::Bytes;
use kvd_core::{DType, ErrorCode, LayerIndex, ModelId, SequenceId};
use kvd_proto::domain::{AttendBatch, AttendQuery};

/// Values of a head.
const DIM: usize = 8;

/// A batch of one head whose query values are small and all different.
fn batch(model: ModelId, queries: Vec<AttendQuery>) -> AttendBatch {
    let rows: u32 = queries.iter().map(|query| query.n_q).sum();
    let values: Vec<f32> = (0..rows as usize * DIM).map(|i| (i % 13) as f32 / 64.0).collect();
    AttendBatch {
        model,
        layer: LayerIndex(0),
        q_heads: 1,
        dtype: DType::F32,
        scale: None,
        soft_cap: None,
        queries,
        q: values.iter().flat_map(|value| value.to_le_bytes()).collect(),
        per_query_errors: false,
    }
}

/// A model of raw rows with one sequence of `tokens` tokens.
async fn stored(bench: &Bench, tokens: u32) -> (ModelId, SequenceId) {
    let model = bench.register("a", "raw").await.shape.id;
    let sequence = bench.service.open_sequence(&call(), model).unwrap();
    for start in (0..tokens).step_by(1 << 16) {
        bench.store(sequence, start, (tokens - start).min(1 << 16)).await.unwrap();
    }
    (model, sequence)
}

/// Blocks that a query plans, and tokens in them.
async fn planned(bench: &Bench, model: ModelId, query: AttendQuery) -> (usize, u64) {
    let batch = batch(model, vec![query]);
    let model = bench.service.find_model(&call(), model).unwrap();
    let resolved = bench.service.resolve_reads(&call(), &model, &batch).unwrap();
    let queries = plan_queries(&batch, &resolved.reads, &resolved.pins, &AttendShelf::default());
    (queries[0].parts.len(), queries[0].tokens())
}

/// Sum of a counter's series.
fn counted(bench: &Bench, name: &str) -> f64 {
    let text = bench.service.metrics().render_page();
    let samples = text.lines().filter(|line| line.starts_with(&format!("{name}{{")));
    samples.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

/// Bytes that one attend adds to those counted as read: logical ones and stored ones.
async fn bytes_read(bench: &Bench, model: ModelId, query: AttendQuery) -> [f64; 2] {
    let names = ["kvd_attended_logical_bytes_total", "kvd_attended_stored_bytes_total"];
    let before = names.map(|name| counted(bench, name));
    bench.service.attend_batch(&call(), batch(model, vec![query])).await.unwrap();
    let after = names.map(|name| counted(bench, name));
    [after[0] - before[0], after[1] - before[1]]
}

#[tokio::test]
async fn a_window_costs_what_the_same_tokens_cost_by_their_start() {
    const TOKENS: u32 = 1 << 20;
    let bench = Bench::new(64 << 20, &[("limits.attend_parts_max", "40000")]);
    let (model, sequence) = stored(&bench, TOKENS).await;
    let all = AttendQuery::new(sequence, 1);
    for window in [1, 17, 64, 1000] {
        let windowed = AttendQuery { sliding_window: Some(window), ..all };
        let from_start = AttendQuery { start: Some(TOKENS - window), ..all };
        let of = async |query| planned(&bench, model, query).await;
        assert_eq!(of(windowed).await, of(from_start).await, "{window}");
        assert_eq!(of(windowed).await.1, u64::from(window));
        let read = bytes_read(&bench, model, windowed).await;
        assert_eq!(read, bytes_read(&bench, model, from_start).await, "{window}");
        // 32 bytes a token.
        assert_eq!(read[0], f64::from(window) * 32.0);
    }
    // All of it is over the limit, its windows are not.
    let refused = bench.service.attend_batch(&call(), batch(model, vec![all])).await.err().unwrap();
    assert_eq!(refused.code(), ErrorCode::LimitExceeded);
    let many = vec![AttendQuery { sliding_window: Some(64), ..all }; 64];
    bench.service.attend_batch(&call(), batch(model, many)).await.unwrap();
}

#[tokio::test]
async fn only_what_some_token_of_a_query_sees_is_planned() {
    let bench = Bench::new(1 << 16, &[]);
    let (model, sequence) = stored(&bench, 160).await;
    let query = |n_q, position, sliding_window| AttendQuery {
        position: Some(position),
        sliding_window,
        ..AttendQuery::new(sequence, n_q)
    };
    // Query, tokens planned, tokens that are seen.
    let cases = [
        // The first token's window and all after it.
        (query(8, 152, Some(4)), 11, 11),
        // Whole blocks up to the last token's position.
        (query(2, 20, None), 32, 22),
        (query(2, 20, Some(5)), 16, 6),
        // A position past the end sees the last of its window, or nothing.
        (query(1, 170, Some(20)), 9, 9),
        (query(1, 170, Some(11)), 0, 0),
        (query(3, 170, Some(12)), 1, 1),
        (query(1, u32::MAX - 1, Some(64)), 0, 0),
        (query(1, u32::MAX - 1, Some(u32::MAX)), 160, 160),
        (query(1, 0, Some(1)), 16, 1),
        (AttendQuery { kv_length: Some(100), ..query(1, 99, Some(10)) }, 10, 10),
        (AttendQuery { start: Some(150), ..query(1, 159, Some(64)) }, 10, 10),
        (AttendQuery { end: Some(120), ..query(1, 159, Some(64)) }, 24, 24),
        (AttendQuery { end: Some(90), ..query(1, 159, Some(64)) }, 0, 0),
    ];
    for (query, tokens, seen) in cases {
        assert_eq!(planned(&bench, model, query).await.1, tokens, "{query:?}");
        assert_eq!(bytes_read(&bench, model, query).await[0], f64::from(seen) * 32.0, "{query:?}");
    }
}

#[tokio::test]
async fn an_end_that_is_not_after_the_start_sees_nothing() {
    let bench = Bench::new(1 << 16, &[]);
    let (model, sequence) = stored(&bench, 160).await;
    for (start, end) in [(50, 10), (160, 0), (500, 400), (u32::MAX, 0), (7, 7)] {
        let query =
            AttendQuery { start: Some(start), end: Some(end), ..AttendQuery::new(sequence, 2) };
        let reply = bench.service.attend_batch(&call(), batch(model, vec![query])).await.unwrap();
        assert_eq!(reply.lse, [f32::NEG_INFINITY; 2], "{start}..{end}");
        assert!(reply.out.iter().all(|byte| *byte == 0));
    }
}

/// Queries of one token; three bad ones among them, one of each kind of judgement.
async fn mixed(bench: &Bench) -> (AttendBatch, Vec<(u32, ErrorCode)>) {
    let (model, good) = stored(bench, 160).await;
    let other = bench.service.register_model(&call(), spec("b", "raw")).await.unwrap().shape.id;
    let strange = bench.service.open_sequence(&call(), other).unwrap();
    let closed = bench.service.open_sequence(&call(), model).unwrap();
    bench.service.close_sequence(&call(), closed).unwrap();
    let empty = bench.service.open_sequence(&call(), model).unwrap();
    let query = |sequence| AttendQuery::new(sequence, 1);
    let queries = vec![
        query(good),
        query(closed),
        AttendQuery { kv_length: Some(161), ..query(good) },
        query(strange),
        // Without a position it would be before the sequence.
        query(empty),
        AttendQuery { position: Some(u32::MAX), ..query(good) },
        AttendQuery { end: Some(30), ..query(good) },
        // Not finite, below.
        query(good),
        AttendQuery { kv_length: Some(0), position: Some(0), ..query(empty) },
    ];
    let mut batch = batch(model, queries);
    let mut q = batch.q.to_vec();
    q[(7 * DIM + 3) * 4..][..4].copy_from_slice(&f32::NAN.to_le_bytes());
    batch.q = q.into();
    let codes = [
        (1, ErrorCode::UnknownSequence),
        (2, ErrorCode::RangeNotStored),
        (3, ErrorCode::InvalidArgument),
        (4, ErrorCode::InvalidArgument),
        (5, ErrorCode::InvalidArgument),
        (7, ErrorCode::NonFinite),
    ];
    (batch, codes.to_vec())
}

#[tokio::test]
async fn a_bad_query_refuses_its_batch_unless_it_may_fail_alone() {
    let bench = Bench::new(1 << 16, &[]);
    let (batch, codes) = mixed(&bench).await;
    let refused = bench.service.attend_batch(&call(), batch.clone()).await.err().unwrap();
    assert_eq!(refused.code(), ErrorCode::UnknownSequence);
    assert!(refused.to_string().starts_with("queries[1]: "), "{refused}");
    let batch = AttendBatch { per_query_errors: true, ..batch };
    let reply = bench.service.attend_batch(&call(), batch.clone()).await.unwrap();
    let errors = reply.query_errors.iter().map(|refused| (refused.index, refused.error.code()));
    assert_eq!(errors.collect::<Vec<_>>(), codes);
    // Each query that was answered has the answer that it gets alone.
    for (index, query) in batch.queries.iter().enumerate() {
        let row = reply.out[index * DIM * 4..][..DIM * 4].to_vec();
        if codes.iter().any(|(bad, _)| *bad as usize == index) {
            assert_eq!(reply.lse[index], f32::NEG_INFINITY, "{index}");
            assert!(row.iter().all(|byte| *byte == 0), "{index}");
            continue;
        }
        let q = batch.q.slice(index * DIM * 4..(index + 1) * DIM * 4);
        let alone = AttendBatch { queries: vec![*query], q, ..batch.clone() };
        let alone = bench.service.attend_batch(&call(), alone).await.unwrap();
        assert!(alone.query_errors.is_empty());
        assert_eq!((row, reply.lse[index]), (alone.out, alone.lse[0]), "{index}");
    }
}

#[tokio::test]
async fn errors_of_the_whole_batch_refuse_it_and_a_batch_of_bad_queries_is_answered() {
    let bench = Bench::new(1 << 16, &[("limits.attend_parts_max", "25")]);
    let (model, good) = stored(&bench, 160).await;
    let query = AttendQuery::new(good, 1);
    let ask = async |change: &dyn Fn(&mut AttendBatch)| {
        let mut asked = batch(model, vec![query; 2]);
        asked.per_query_errors = true;
        change(&mut asked);
        bench.service.attend_batch(&call(), asked).await
    };
    type Case<'a> = (&'a dyn Fn(&mut AttendBatch), ErrorCode);
    let cases: [Case<'_>; 4] = [
        (&|batch| batch.q = Bytes::new(), ErrorCode::ShapeMismatch),
        (&|batch| batch.model = ModelId(u64::MAX), ErrorCode::UnknownModel),
        (&|batch| batch.layer = LayerIndex(1), ErrorCode::InvalidArgument),
        (
            &|batch| {
                batch.queries = vec![query; 3];
                batch.q = vec![0; 3 * DIM * 4].into();
            },
            ErrorCode::LimitExceeded,
        ),
    ];
    for (change, code) in cases {
        assert_eq!(ask(change).await.err().unwrap().code(), code);
    }
    let reply = ask(&|batch| {
        batch.queries.iter_mut().for_each(|query| query.sequence = SequenceId(u64::MAX));
    });
    let reply = reply.await.unwrap();
    assert_eq!((reply.query_errors.len(), reply.lse), (2, vec![f32::NEG_INFINITY; 2]));
    let reply = ask(&|batch| {
        batch.queries.iter_mut().for_each(|query| query.n_q = 0);
        batch.q = Bytes::new();
    });
    let reply = reply.await.unwrap();
    assert_eq!((reply.query_errors.len(), reply.lse.len(), reply.out.len()), (2, 0, 0));
}

#[tokio::test]
async fn a_query_that_overflows_times_the_scale_fails_alone() {
    let bench = Bench::new(1 << 16, &[]);
    let (model, good) = stored(&bench, 160).await;
    let queries = vec![AttendQuery::new(good, 1), AttendQuery::new(good, 1)];
    let batch = batch(model, queries);
    let mut q = batch.q.to_vec();
    q[DIM * 4..][..4].copy_from_slice(&1e38f32.to_le_bytes());
    let batch = AttendBatch { scale: Some(10.0), q: q.into(), per_query_errors: true, ..batch };
    let reply = bench.service.attend_batch(&call(), batch).await.unwrap();
    let codes: Vec<_> = reply.query_errors.iter().map(|r| (r.index, r.error.code())).collect();
    assert_eq!(codes, [(1, ErrorCode::NonFinite)]);
    assert!(reply.lse[0].is_finite() && reply.lse[1] == f32::NEG_INFINITY, "{:?}", reply.lse);
}
