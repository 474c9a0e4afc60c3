//! Bytes as a message of the wire, then as what it means: refused with a field's name, or values
//! within their limits; never a panic.
#![no_main]

use kvd_core::Geometry;
use kvd_proto::domain::{
    AttendBatch, Attended, CalibrationOrder, LoadPiece, LoadRange, LoadStep, ModelIdentity,
    ModelSpec, SampledQueries, SequenceFilter, SessionHold, StoreChunk, StoreStep,
};
use kvd_proto::v1;
use kvd_testkit::hostile::small_geometry;
use libfuzzer_sys::fuzz_target;
use prost::Message;

/// Reads a message and what it means.
fn read_as<M: Message + Default, D: TryFrom<M>>(bytes: &[u8]) -> Option<D> {
    D::try_from(M::decode(bytes).ok()?).ok()
}

fn read_attend(bytes: &[u8], geometry: &Geometry) {
    let Some(batch) = read_as::<v1::AttendRequest, AttendBatch>(bytes) else { return };
    assert!((1..=AttendBatch::QUERIES_MAX).contains(&batch.queries.len()));
    assert!(batch.query_rows() <= AttendBatch::ROWS_MAX);
    assert!((1..=AttendBatch::Q_HEADS_MAX).contains(&batch.q_heads));
    for query in &batch.queries {
        // With errors of each query it is the service that judges them.
        let sound = query.check_query().is_ok();
        assert!(sound || batch.per_query_errors, "{query:?}");
        let is_within = query.position.is_none_or(|at| at.checked_add(query.n_q).is_some());
        assert!(is_within || !sound, "{query:?}");
    }
    let _ = batch.check_shape(geometry);
}

fn read_store(bytes: &[u8], geometry: &Geometry) {
    let Some(chunk) = read_as::<v1::StoreBlocksRequest, StoreChunk>(bytes) else { return };
    assert!(chunk.tokens > 0 && chunk.end() > chunk.start, "{chunk:?}");
    let _ = chunk.check_shape(geometry);
}

fn read_model(bytes: &[u8]) {
    let Ok(request) = v1::RegisterModelRequest::decode(bytes) else { return };
    if let Ok(spec) = ModelSpec::from_wire(request, 64) {
        assert!((1..=ModelSpec::NAME_LENGTH_MAX).contains(&spec.name.len()));
        assert!(spec.codec.len() as u64 <= ModelSpec::CODEC_LENGTH_MAX);
        assert!(spec.geometry.layers > 0 && spec.geometry.kv_heads > 0);
    }
}

fuzz_target!(|data: &[u8]| {
    let Some((kind, bytes)) = data.split_first() else { return };
    let geometry = small_geometry();
    match kind % 12 {
        0 => read_attend(bytes, &geometry),
        1 => read_store(bytes, &geometry),
        2 => read_model(bytes),
        3 => drop(
            read_as::<v1::LoadBlocksRequest, LoadRange>(bytes)
                .map(|range| range.check_shape(&geometry)),
        ),
        4 => drop(read_as::<v1::StoreStepRequest, StoreStep>(bytes)),
        5 => drop(read_as::<v1::LoadStepRequest, LoadStep>(bytes)),
        6 => drop(read_as::<v1::HoldSessionRequest, SessionHold>(bytes)),
        7 => drop(read_as::<v1::ListSequencesRequest, SequenceFilter>(bytes)),
        8 => drop(read_as::<v1::CalibrateModelRequest, CalibrationOrder>(bytes)),
        9 => drop(read_as::<v1::ModelIdentity, ModelIdentity>(bytes)),
        // What a client reads of a daemon.
        10 => drop(read_as::<v1::AttendResponse, Attended>(bytes)),
        _ => {
            let _ = read_as::<v1::LoadBlocksResponse, LoadPiece>(bytes);
            let _ = read_as::<v1::SampleQueriesResponse, SampledQueries>(bytes);
        }
    }
});
