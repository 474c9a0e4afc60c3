//! The engine without kvd against the numbers measured when the fixture was made.

use kvd_engine::{
    LanguageModel, LocalAttention, ModelAssets, ModelConfig, QualitySums, TextSteps, TokenWindow,
    teacher_forced,
};

fn fixture() -> (ModelAssets, LanguageModel) {
    let assets = ModelAssets::embedded_fixture().expect("the fixture");
    let config = ModelConfig::parse_json(&assets.config).expect("its configuration");
    let model = LanguageModel::load_model(config, &assets.weights).expect("its weights");
    (assets, model)
}

fn local(model: &LanguageModel) -> LocalAttention {
    LocalAttention::new(model.config().attention_heads(), model.config().num_hidden_layers)
}

/// Positions 256 to 2047 of the first three windows: 1.4531 nats, perplexity 4.276.
#[tokio::test]
async fn held_out_loss_is_the_one_the_fixture_was_published_with() {
    let (assets, model) = fixture();
    let mut sums = QualitySums::default();
    for index in 0..3 {
        let window = TokenWindow::new(&assets.held_out, 0, 2048, index).unwrap();
        let mut attention = local(&model);
        let steps = TextSteps { chunk: 64, start: 0, scored_from: 256 };
        let run = teacher_forced(&model, &window, steps, &mut attention, |_| {}).await.unwrap();
        sums.add_window(&run, &run);
    }
    let quality = sums.mean_quality();
    assert_eq!(quality.scored_tokens, 5376);
    assert!((quality.loss_nats - 1.4531).abs() < 1e-4, "{quality:?}");
    assert!((quality.perplexity - 4.276).abs() < 1e-3, "{quality:?}");
}

#[tokio::test]
async fn one_token_per_step_equals_the_chunked_pass() {
    let (assets, model) = fixture();
    let tokens = &assets.held_out[..150];
    let mut chunked = Vec::new();
    let mut attention = local(&model);
    for (i, chunk) in tokens.chunks(64).enumerate() {
        chunked.extend(model.forward_tokens(chunk, i * 64, &mut attention).await.unwrap());
    }
    let mut attention = local(&model);
    let mut stepped = Vec::new();
    for (position, token) in tokens.iter().enumerate() {
        stepped.extend(model.forward_tokens(&[*token], position, &mut attention).await.unwrap());
    }
    assert_eq!(chunked.len(), stepped.len());
    let largest = chunked.iter().zip(&stepped).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    // Sums in another order may round a cached value to the other neighbour in f16, which moves
    // logits by thousandths; a wrong position or row moves them by whole numbers.
    assert!(largest < 1e-2, "logits differ by {largest}");
}

#[tokio::test]
async fn a_token_outside_the_vocabulary_is_refused() {
    let (_, model) = fixture();
    assert!(model.forward_tokens(&[2048], 0, &mut local(&model)).await.is_err());
}
