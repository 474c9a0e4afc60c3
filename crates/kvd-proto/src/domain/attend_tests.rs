use super::*;
use kvd_core::{Coded, ErrorCode, RopePairing};

fn batch() -> AttendBatch {
    let full = AttendQuery {
        sequence: SequenceId(2),
        n_q: 3,
        kv_length: Some(9),
        position: Some(20),
        start: Some(1),
        end: Some(8),
        sliding_window: Some(5),
    };
    AttendBatch {
        model: ModelId(1),
        layer: LayerIndex(0),
        q_heads: 4,
        dtype: DType::F32,
        scale: Some(0.125),
        soft_cap: Some(30.0),
        queries: vec![AttendQuery::new(SequenceId(1), 1), full],
        q: Bytes::from(vec![0; 4 * 4 * 8 * 4]),
        per_query_errors: false,
    }
}

fn refusal(change: impl FnOnce(&mut v1::AttendRequest)) -> String {
    let mut request = batch().into();
    change(&mut request);
    AttendBatch::try_from(request).unwrap_err().to_string()
}

#[test]
fn batch_round_trips() {
    let wire = v1::AttendRequest::from(batch());
    assert_eq!(AttendBatch::try_from(wire).unwrap(), batch());
    let plain = AttendBatch { scale: None, soft_cap: None, ..batch() };
    assert_eq!(AttendBatch::try_from(v1::AttendRequest::from(plain.clone())).unwrap(), plain);
    let bad_query = AttendQuery { position: Some(u32::MAX), ..AttendQuery::new(SequenceId(1), 0) };
    let lenient = AttendBatch { per_query_errors: true, queries: vec![bad_query], ..batch() };
    assert_eq!(AttendBatch::try_from(v1::AttendRequest::from(lenient.clone())).unwrap(), lenient);
}

#[test]
fn refusals_name_the_field() {
    assert_eq!(refusal(|r| r.q_heads = 0), "q_heads is missing");
    assert_eq!(refusal(|r| r.q_heads = 20000), "q_heads is 20000; the maximum is 16384");
    assert_eq!(refusal(|r| r.dtype = 0), "dtype is missing");
    for bad in [0.0, -1.0, f32::NAN, f32::INFINITY] {
        assert!(refusal(|r| r.scale = Some(bad)).starts_with("scale: "), "{bad}");
    }
    for bad in [-1.0, f32::NAN, f32::INFINITY] {
        assert!(refusal(|r| r.soft_cap = bad).starts_with("soft_cap: "), "{bad}");
    }
    assert_eq!(refusal(|r| r.queries.clear()), "queries is missing");
    assert_eq!(refusal(|r| r.q = None), "q is missing");
}

#[test]
fn refused_query_is_named_by_its_index() {
    let query = |change: fn(&mut v1::Query)| refusal(|r| change(&mut r.queries[1]));
    assert_eq!(query(|q| q.n_q = 0), "queries[1].n_q: must be at least 1");
    assert!(query(|q| q.position = Some(u32::MAX)).starts_with("queries[1].position: "));
    let early = query(|q| {
        q.position = None;
        q.kv_length = Some(2);
    });
    assert!(early.starts_with("queries[1].kv_length: "), "{early}");
}

#[test]
fn limits_are_inclusive() {
    let with = |queries: usize, n_q: u32| {
        let mut request = v1::AttendRequest::from(batch());
        request.queries = vec![v1::Query { n_q, ..Default::default() }; queries];
        AttendBatch::try_from(request)
    };
    with(AttendBatch::QUERIES_MAX, 1).unwrap();
    with(1, AttendBatch::ROWS_MAX).unwrap();
    for (queries, n_q) in [(AttendBatch::QUERIES_MAX + 1, 1), (1, AttendBatch::ROWS_MAX + 1)] {
        assert_eq!(with(queries, n_q).unwrap_err().code(), ErrorCode::LimitExceeded);
    }
    // The sum itself must not wrap.
    assert_eq!(with(4096, u32::MAX).unwrap_err().code(), ErrorCode::LimitExceeded);
}

#[test]
fn shape_is_checked_against_the_geometry() {
    let mut geometry = Geometry {
        layers: 1,
        kv_heads: 2,
        head_dim_k: 8,
        head_dim_v: 6,
        block_tokens: 64,
        dtype: DType::F16,
        rope_pairing: RopePairing::Half,
    };
    batch().check_shape(&geometry).unwrap();
    geometry.head_dim_k = 4;
    let error = batch().check_shape(&geometry).unwrap_err();
    assert!(error.to_string().starts_with("q has 512 bytes"), "{error}");
    geometry.kv_heads = 3;
    let error = batch().check_shape(&geometry).unwrap_err();
    assert_eq!(error.code(), ErrorCode::ShapeMismatch);
    assert!(error.to_string().starts_with("q_heads: "), "{error}");
    let deep = AttendBatch { layer: LayerIndex(1), ..batch() };
    assert!(deep.check_shape(&geometry).unwrap_err().to_string().starts_with("layer: "));
}

#[test]
fn attended_round_trips_and_keeps_minus_infinity() {
    let attended = Attended {
        out: Bytes::from_static(&[1, 2, 3, 4]),
        lse: vec![f32::NEG_INFINITY, 0.5, -3.0e38],
        query_errors: vec![QueryError {
            query: 3,
            error: CallError::new(ErrorCode::UnknownSequence, "sequence 9"),
        }],
    };
    let mut wire = v1::AttendResponse::from(attended.clone());
    assert_eq!(Attended::try_from(wire.clone()).unwrap(), attended);
    wire.lse = Some(inline_payload(Bytes::from_static(&[0; 5])));
    let error = Attended::try_from(wire).unwrap_err();
    assert_eq!(error.to_string(), "lse: is not a whole number of f32");
}
