//! A whole run, shortened, against a stand-in for the daemon.
#![expect(clippy::unwrap_used, reason = "a test may fail")]

mod support;

use kvd_client::Endpoint;
use kvd_eval::demo::{DemoOptions, run_demo};
use support::StandIn;

fn short(endpoint: Endpoint, codecs: &[&str]) -> DemoOptions {
    DemoOptions {
        codecs: codecs.iter().map(|codec| codec.parse().unwrap()).collect(),
        passages: 2,
        passage_tokens: 160,
        chunk_tokens: 48,
        prompt_tokens: 100,
        new_tokens: 12,
        ..DemoOptions::new(endpoint)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn raw_equals_the_run_without_kvd_and_a_lossy_codec_does_not() {
    let daemon = StandIn::default();
    let options = short(daemon.serve().await, &["raw", "fp8"]);
    let mut text = Vec::new();
    let report = run_demo(options, &mut text).await.unwrap();

    let [raw, lossy] = &report.codecs[..] else { panic!("two codecs") };
    let reference = &report.without_kvd;
    assert_eq!(reference.quality.scored_tokens, 2 * 140);
    assert_eq!(raw.generation.tokens, reference.generation.tokens);
    assert!(raw.generation.is_same());
    let ppl = (raw.quality.perplexity, reference.quality.perplexity);
    assert!((ppl.0 / ppl.1 - 1.0).abs() < 1e-5, "{ppl:?}");
    assert!(raw.quality.kl_nats.abs() < 1e-6, "{:?}", raw.quality);
    assert_eq!(raw.attention_error.codec, 0.0);
    assert!(raw.attention_error.kernel < 1e-6, "{:?}", raw.attention_error);

    assert!((1e-3..0.2).contains(&lossy.attention_error.codec), "{:?}", lossy.attention_error);
    assert!(lossy.attention_error.kernel < 1e-6, "{:?}", lossy.attention_error);
    assert!((1e-6..0.1).contains(&lossy.quality.kl_nats), "{:?}", lossy.quality);

    assert_eq!((raw.storage.bits_per_value, raw.storage.ratio), (8.0, 2.0));
    assert_eq!(raw.storage.parts.packed_values, 2 * 160 * 3 * 2 * 2 * 128);
    assert_eq!(raw.storage.model_bytes, 7);
    assert_eq!((raw.decode.store.calls, raw.decode.attend.calls), (12 * 3, 12 * 3));
    // 3 steps for the prompt and 4 for each passage, 3 layers each.
    assert_eq!(raw.prefill.attend.calls, (3 + 2 * 4) * 3);

    let text = String::from_utf8(text).unwrap();
    assert!(text.contains("tiny model") && text.contains("raw: the same 12 tokens"), "{text}");
    let state = daemon.0.lock();
    assert!(state.sequences.is_empty() && state.models.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn keep_open_leaves_the_passages_and_json_is_one_object() {
    let daemon = StandIn::default();
    let options = DemoOptions {
        keep_open: true,
        json: true,
        passages: 1,
        ..short(daemon.serve().await, &["raw"])
    };
    let mut text = Vec::new();
    run_demo(options, &mut text).await.unwrap();
    let report: serde_json::Value = serde_json::from_slice(&text).unwrap();
    assert_eq!(report["codecs"][0]["codec"], "raw");
    assert!(report["without_kvd"]["quality"]["perplexity"].as_f64().unwrap() > 1.0);
    let state = daemon.0.lock();
    let lengths = state.sequences.values().map(|s| s.layers[2][1].len() / 256);
    assert_eq!(lengths.collect::<Vec<_>>(), [160]);
    assert_eq!(state.models.len(), 1);
}

#[tokio::test]
async fn what_cannot_run_is_refused_before_any_work() {
    let nobody: Endpoint = "http://127.0.0.1:9".parse().unwrap();
    let refusal = async |options: DemoOptions| {
        format!("{:#}", run_demo(options, &mut Vec::new()).await.unwrap_err())
    };
    let error = refusal(DemoOptions { passages: 0, ..short(nobody.clone(), &["raw"]) }).await;
    assert!(error.contains("passages"), "{error}");
    let error = refusal(short(nobody, &["raw"])).await;
    assert!(error.contains("http://127.0.0.1:9"), "{error}");
}
