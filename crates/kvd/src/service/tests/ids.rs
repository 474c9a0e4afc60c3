//! Ids of another boot, of another kind, and of nobody.

use super::bench::{Bench, call, chunk};
use crate::service::{Service, ServiceError};
use kvd_core::{DType, ErrorCode, LayerIndex, ModelId, SequenceId};
use kvd_proto::domain::{AttendBatch, AttendQuery, LoadRange};
use kvd_store::SequenceHint;
use std::sync::Arc;

fn batch(model: ModelId, sequence: SequenceId) -> AttendBatch {
    AttendBatch {
        model,
        layer: LayerIndex(0),
        q_heads: 1,
        dtype: DType::F16,
        scale: None,
        soft_cap: None,
        queries: vec![AttendQuery::new(sequence, 1)],
        q: vec![0; 16].into(),
        per_query_errors: false,
    }
}

/// Answers of every call with these ids, by its name.
async fn refusals(
    service: &Arc<Service>,
    model: ModelId,
    sequence: SequenceId,
) -> Vec<(&'static str, ErrorCode, ServiceError)> {
    use ErrorCode::{UnknownModel, UnknownSequence};
    let call = call();
    let range = LoadRange { sequence, layer: LayerIndex(0), start: 0, end: 1, dtype: None };
    let hint = SequenceHint::default();
    let mut refused = vec![
        ("describe model", UnknownModel, service.find_model(&call, model).err()),
        ("open", UnknownModel, service.open_sequence(&call, model).err()),
        ("unregister", UnknownModel, service.unregister_model(&call, model).await.err()),
        ("fork", UnknownSequence, service.fork_sequence(&call, sequence, None).err()),
        ("truncate", UnknownSequence, service.truncate_sequence(&call, sequence, 0).err()),
        ("hint", UnknownSequence, service.hint_sequence(&call, sequence, hint).err()),
        ("describe", UnknownSequence, service.describe_sequence(&call, sequence).err()),
        ("load", UnknownSequence, service.load_pieces(&call, &range).err()),
        ("close", UnknownSequence, service.close_sequence(&call, sequence).err()),
        ("model of", UnknownSequence, service.model_of(&call, sequence).err()),
    ];
    let store = service.store_chunk(&call, chunk(sequence, 0, 4)).await;
    refused.push(("store", UnknownSequence, store.err()));
    refused
        .into_iter()
        .map(|(name, code, error)| (name, code, error.unwrap_or_else(|| panic!("{name} is taken"))))
        .collect()
}

#[tokio::test]
async fn ids_of_another_boot_are_unknown_and_say_that_the_daemon_was_restarted() {
    let (old, new) = (Bench::new(1 << 16, &[]), Bench::new(1 << 16, &[]));
    let model = old.register("a", "raw").await.shape.id;
    let sequence = old.service.open_sequence(&call(), model).unwrap();
    let kept_model = new.register("a", "raw").await.shape.id;
    let kept = new.service.open_sequence(&call(), kept_model).unwrap();
    new.store(kept, 0, 4).await.unwrap();
    assert_ne!((model, sequence), (kept_model, kept));
    let before = new.service.describe_sequence(&call(), kept).unwrap();
    let mut all = refusals(&new.service, model, sequence).await;
    let attend = new.service.attend_batch(&call(), batch(model, sequence)).await.err().unwrap();
    all.push(("attend", ErrorCode::UnknownSequence, attend));
    let attend = new.service.attend_batch(&call(), batch(model, kept)).await.err().unwrap();
    all.push(("attend of a stale model", ErrorCode::UnknownModel, attend));
    for (name, code, error) in all {
        assert_eq!(error.code(), code, "{name}: {error}");
        assert!(error.to_string().contains("restarted"), "{name}: {error}");
        assert!(error.to_string().contains("open a sequence"), "{name}: {error}");
        let stale = error.stale_id().unwrap_or_else(|| panic!("{name}: {error}"));
        assert_eq!(stale.boot_id, new.service.boot_id());
        assert!(old.service.boot_id().starts_with(&stale.id_boot));
    }
    assert_eq!(new.service.describe_sequence(&call(), kept).unwrap(), before);
}

#[tokio::test]
async fn ids_of_this_boot_that_are_unknown_say_nothing_of_a_restart() {
    let bench = Bench::new(1 << 16, &[]);
    let model = bench.register("a", "raw").await.shape.id;
    let sequence = bench.service.open_sequence(&call(), model).unwrap();
    let gone = bench.service.open_sequence(&call(), model).unwrap();
    bench.service.close_sequence(&call(), gone).unwrap();
    // Closed; the other kind's; next to one that is open; what a counter would give.
    let pairs = [
        (ModelId(sequence.0), gone),
        (ModelId(sequence.0), SequenceId(model.0)),
        (ModelId(model.0 + 1), SequenceId(sequence.0 ^ 1)),
        (ModelId(1), SequenceId(1)),
        (ModelId(0), SequenceId(0)),
        (ModelId(u64::MAX), SequenceId(u64::MAX)),
    ];
    for (model, sequence) in pairs {
        for (name, code, error) in refusals(&bench.service, model, sequence).await {
            assert_eq!(error.code(), code, "{name}: {error}");
            assert!(error.stale_id().is_none(), "{name}: {error}");
            assert!(!error.to_string().contains("restarted"), "{name}: {error}");
        }
    }
}

#[tokio::test]
async fn sequences_are_found_on_their_device_by_their_ids() {
    let (service, _probes) = super::bench::several(3, 1 << 16, &[]);
    let mut sequences = Vec::new();
    for name in ["a", "b", "c"] {
        let spec = super::bench::spec(name, "raw");
        let model = service.register_model(&call(), spec).await.unwrap();
        for _ in 0..20 {
            let id = service.open_sequence(&call(), model.shape.id).unwrap();
            sequences.push((id, model.shape.id));
        }
    }
    for (id, model) in sequences {
        assert_eq!(service.describe_sequence(&call(), id).unwrap().model, model);
    }
}
