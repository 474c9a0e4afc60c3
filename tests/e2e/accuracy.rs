//! The accuracy contract: a codec that declares an error bound keeps it, says how often it had to
//! fall back, and answers attention over what it then holds.

use kvd::metrics::Metric;
use kvd_client::DType;
use kvd_tests::metrics::MetricsPage;
use kvd_tests::{
    LayerRows, ModelShape, StoredSequence, TestEngine, TestRng, assert_within_budget, daemon,
    engine,
};

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
    let mut rng = TestRng::new(SEED);
    let shape = ModelShape { dtype: DType::F16, layers: 3, ..ModelShape::small_shape() };
    let engine = engine(&daemon).with_name("bounded").register_model(shape.clone(), CODEC).await;
    let mut conversation = engine.open_sequence().await;
    // One request a block, as in decoding, then many blocks at once.
    for tokens in [16, 16, 16, 160] {
        engine.grow_sequence(&mut conversation, tokens, &mut rng).await;
    }
    let loaded = engine.load_layer(&conversation, 0).await;
    let original = &conversation.layers[0];
    for block in 0..13 {
        let part = |rows: &LayerRows| rows.token_range(&shape, block * 16..(block + 1) * 16);
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
    let (status, text) = daemon.admin_page("/metrics").await;
    assert_eq!(status, 200);
    let page = MetricsPage::parse_page(&text);
    let of = |metric: Metric, side: &str| {
        page.sum_samples(metric.name(), &[&format!("side=\"{side}\"")])
    };
    assert_eq!(of(Metric::OverBoundPagesTotal, "k"), pages as f64);
    assert_eq!(of(Metric::OverBoundPagesTotal, "v"), 0.0);
    assert!((of(Metric::ErrorBound, "k") - 0.15).abs() < 1e-6);
    let blocks = 13.0 * f64::from(shape.layers);
    assert_eq!(page.sum_samples(Metric::SampledBlocksTotal.name(), &[]), blocks);

    let question = engine.random_question(&conversation, 3, &mut rng);
    let answer = engine.ask_question(&question).await;
    assert_within_budget("over what fell back", &engine, &question, &answer, &[&loaded]);
}

/// Rows of a model whose keys have large biases, turned by RoPE in two pairs of channels.
fn biased(shape: &ModelShape, tokens: u32, rng: &mut TestRng) -> LayerRows {
    let mut rows = LayerRows::random_rows(shape, tokens, rng);
    let dim = shape.head_dim_k as usize;
    for (index, row) in rows.k.chunks_exact_mut(dim).enumerate() {
        let token = (index / shape.kv_heads as usize) as f32;
        for (pair, length) in BIASES {
            let angle = token * 1e6f32.powf(-2.0 * pair as f32 / dim as f32);
            for (channel, share) in [(pair, angle.cos()), (pair + dim / 2, angle.sin())] {
                row[channel] = half::f16::from_f32(row[channel] + length * share).to_f32();
            }
        }
    }
    rows
}

/// Pair and length: one that hardly turns, and one that turns in every block.
const BIASES: [(usize, f32); 2] = [(29, 300.0), (4, 200.0)];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_with_large_biases_fall_back_on_every_page() {
    let daemon = daemon().start().await;
    let shape = ModelShape { dtype: DType::F16, ..ModelShape::small_shape() };
    let exact = engine(&daemon).with_name("exact").register_model(shape.clone(), "raw").await;
    for (index, (codec, bound)) in
        [("fp8", 0.05), ("turbo-4", 0.13), ("k=uniform(b=8,axis=token); v=fp8", 0.01)]
            .into_iter()
            .enumerate()
    {
        let mut rng = TestRng::new(SEED + index as u64);
        let rows = biased(&shape, 384, &mut rng);
        let named = |kind: &str| engine(&daemon).with_name(&format!("{kind}-{index}"));
        let plain = named("plain").register_model(shape.clone(), codec).await;
        let text = format!("{codec}; k.bound={bound}; v.bound=0.2");
        let bounded = named("bounded").register_model(shape.clone(), &text).await;
        // Errors of rows are within the bound, errors of scores are not, and the figures say both.
        let (mut right, mut wrong) = (exact.open_sequence().await, plain.open_sequence().await);
        exact.store_rows(&mut right, 0, &rows).await.unwrap();
        plain.store_rows(&mut wrong, 0, &rows).await.unwrap();
        let mut question = exact.random_question(&right, 12, &mut rng);
        for query in question.q.chunks_exact_mut(shape.head_dim_k as usize) {
            query.iter_mut().for_each(|x| *x *= 1.5);
            BIASES.iter().for_each(|(pair, _)| query[*pair] += 8.0);
        }
        let ask = async |engine: &TestEngine, conversation: &StoredSequence| {
            let mut question = question.clone();
            question.queries[0].sequence = conversation.sequence;
            let wide = |x: &f32| f64::from(*x);
            engine.ask_question(&question).await.out.iter().map(wide).collect::<Vec<f64>>()
        };
        let reference = ask(&exact, &right).await;
        let off = |out: &[f64]| {
            let error: f64 = out.iter().zip(&reference).map(|(a, b)| (a - b).powi(2)).sum();
            (error / reference.iter().map(|x| x * x).sum::<f64>()).sqrt()
        };
        let lost = off(&ask(&plain, &wrong).await);
        let stats = plain.client.describe_model(plain.model).await.unwrap().model.unwrap();
        assert!(lost > 0.2, "{codec}: {lost}");
        assert!(stats.sampled_error_k > bound, "{codec}: {}", stats.sampled_error_k);
        assert!(stats.sampled_row_error_k < 0.13, "{codec}: {}", stats.sampled_row_error_k);

        // In several requests before anything was asked, and again by the queries that were.
        let pages = u64::from(rows.tokens / shape.block_tokens * shape.kv_heads);
        for round in 1..3 {
            let mut conversation = bounded.open_sequence().await;
            for start in (0..rows.tokens).step_by(128) {
                let part = rows.token_range(&shape, start..start + 128);
                bounded.store_rows(&mut conversation, 0, &part).await.unwrap();
            }
            let left = off(&ask(&bounded, &conversation).await);
            let stats = bounded.client.describe_model(bounded.model).await.unwrap();
            let stats = stats.model.unwrap();
            assert_eq!(stats.over_bound_pages_k, round * pages, "{codec}: {lost} became {left}");
            assert!(stats.sampled_error_k <= bound, "{codec}: {}", stats.sampled_error_k);
            assert!(left < 0.2, "{codec}: {lost} became {left}");
        }
    }
}
