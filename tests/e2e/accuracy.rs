//! The accuracy contract: a codec that declares an error bound keeps it, says how often it had to
//! fall back, and answers attention over what it then holds.

use kvd::metrics::Metric;
use kvd_client::DType;
use kvd_tests::metrics::Exposition;
use kvd_tests::{Rng, Rows, Shape, assert_within_budget, daemon, engine};

const SEED: u64 = 20_240_608;

/// One range for a page of keys and two bits are far too coarse for rows with outlier channels;
/// values keep their bound.
const CODEC: &str =
    "k=uniform(b=2,axis=block); v=uniform(b=4,axis=token); k.bound=0.15; v.bound=0.5";

fn relative_error(stored: &[f32], original: &[f32]) -> f64 {
    let error: f64 = stored.iter().zip(original).map(|(a, b)| f64::from(a - b).powi(2)).sum();
    (error / original.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>()).sqrt()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_declared_bound_holds_and_fallbacks_are_counted() {
    let daemon = daemon().start().await;
    let mut rng = Rng::new(SEED);
    let shape = Shape { dtype: DType::F16, layers: 3, ..Shape::small() };
    let engine = engine(&daemon).named("bounded").register(shape.clone(), CODEC).await;
    let mut conversation = engine.open().await;
    // One request a block, as in decoding, then many blocks at once.
    for tokens in [16, 16, 16, 160] {
        engine.grow(&mut conversation, tokens, &mut rng).await;
    }
    let loaded = engine.load(&conversation, 0).await;
    let original = &conversation.layers[0];
    for block in 0..13 {
        let part = |rows: &Rows| rows.part(&shape, block * 16..(block + 1) * 16);
        let (stored, original) = (part(&loaded), part(original));
        let error = relative_error(&stored.k, &original.k);
        assert!(error > 0.001 && error <= 0.15, "block {block}: {error}");
    }

    let described = engine.client.describe_model(engine.model).await.unwrap();
    let model = described.model.unwrap();
    let pages = 13 * u64::from(shape.kv_heads) * u64::from(shape.layers);
    assert_eq!((model.over_bound_pages_k, model.over_bound_pages_v), (pages, 0));
    assert_eq!(model.fallback_pages, 0);
    assert!(model.sampled_error_k <= 0.15 && model.sampled_error_v <= 0.5);
    let (status, text) = daemon.page("/metrics").await;
    assert_eq!(status, 200);
    let page = Exposition::parse(&text);
    let of = |metric: Metric, side: &str| page.sum(metric.name(), &[&format!("side=\"{side}\"")]);
    assert_eq!(of(Metric::OverBoundPagesTotal, "k"), pages as f64);
    assert_eq!(of(Metric::OverBoundPagesTotal, "v"), 0.0);
    assert!((of(Metric::ErrorBound, "k") - 0.15).abs() < 1e-6);
    let blocks = 13.0 * f64::from(shape.layers);
    assert_eq!(page.sum(Metric::SampledBlocksTotal.name(), &[]), blocks);

    let question = engine.question(&conversation, 3, &mut rng);
    let answer = engine.ask(&question).await;
    assert_within_budget("over what fell back", &engine, &question, &answer, &[&loaded]);
}
