//! A model that is unregistered is gone everywhere: maps, series, the device.

use super::bench::{Bench, call};
use kvd_core::{DType, ErrorCode, LayerIndex};
use kvd_proto::domain::{AttendBatch, AttendQuery};

/// Everything that is counted by model or by sequence.
#[derive(Debug, PartialEq, Eq)]
struct Counts {
    models: usize,
    on_the_device: usize,
    sequences_and_ledgers: [usize; 2],
    lines_of_metrics: usize,
    used_bytes: u64,
}

fn counts(bench: &Bench) -> Counts {
    bench.service.refresh_gauges();
    let page = bench.service.metrics().render_page();
    Counts {
        models: bench.models().0.len(),
        on_the_device: bench.probe.models.lock().len(),
        sequences_and_ledgers: bench.service.shards[0].store.entry_counts(),
        lines_of_metrics: page.lines().filter(|line| !line.is_empty()).count(),
        used_bytes: bench.service.pool_stats().used_bytes,
    }
}

/// One model from its registration to its end, with what a model may be asked between.
async fn cycle(bench: &Bench, name: &str) {
    let model = bench.register(name, "kivi-4").await.shape.id;
    let sequence = bench.service.open_sequence(&call(), model).unwrap();
    bench.store(sequence, 0, 200).await.unwrap();
    let fork = bench.service.fork_sequence(&call(), sequence, None).unwrap().id;
    let batch = AttendBatch {
        model,
        layer: LayerIndex(0),
        q_heads: 1,
        dtype: DType::F16,
        scale: None,
        soft_cap: None,
        queries: vec![AttendQuery::new(sequence, 1)],
        q: vec![0; 16].into(),
        per_query_errors: false,
    };
    bench.service.attend_batch(&call(), batch).await.unwrap();
    for id in [fork, sequence] {
        bench.service.close_sequence(&call(), id).unwrap();
    }
    bench.service.unregister_model(&call(), model).await.unwrap();
}

#[tokio::test]
async fn cycles_of_models_leave_nothing_that_is_counted_by_model() {
    let bench = Bench::new(1 << 20, &[]);
    cycle(&bench, "first").await;
    bench.idle().await;
    let after_one = counts(&bench);
    assert_eq!((after_one.models, after_one.on_the_device), (0, 0));
    assert_eq!(after_one.sequences_and_ledgers, [0, 0]);
    for number in 0..50 {
        cycle(&bench, &format!("model-{number}")).await;
    }
    bench.idle().await;
    assert_eq!(counts(&bench), after_one);
}

#[tokio::test]
async fn a_sequence_that_is_closed_while_it_is_stored_to_leaves_no_ledger() {
    let bench = Bench::new(1 << 20, &[]);
    let model = bench.register("a", "raw").await.shape.id;
    let sequence = bench.service.open_sequence(&call(), model).unwrap();
    let release = bench.hold().await;
    let service = bench.service.clone();
    let chunk = super::bench::chunk(sequence, 0, 4);
    let store = tokio::spawn(async move { service.store_chunk(&call(), chunk).await });
    bench.queued(1).await;
    // The append in flight still holds the ledger.
    bench.service.close_sequence(&call(), sequence).unwrap();
    drop(release);
    store.await.unwrap().unwrap();
    bench.service.unregister_model(&call(), model).await.unwrap();
    bench.idle().await;
    assert_eq!(bench.service.shards[0].store.entry_counts(), [0, 0]);
    assert_eq!(bench.service.pool_stats().used_bytes, 0);
    let again = bench.service.open_sequence(&call(), model).unwrap_err();
    assert_eq!(again.code(), ErrorCode::UnknownModel);
}
