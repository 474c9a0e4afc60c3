//! Bits shared by sensitivity: better than an even split on text that nothing was fitted to, and
//! the even split where that cannot be known.
#![allow(clippy::unwrap_used, reason = "a test may fail")]

use kvd_codec::Calibration;
use kvd_core::{DType, Geometry, LayerIndex, RopePairing, Side};
use kvd_eval::calibrate::{
    CalibrateOptions, CalibrationRun, DumpSource, KvDump, LayerRows, ModelSource, RowSource,
    run_calibration,
};
use kvd_eval::split::{BitSplit, SplitVerdict};
use kvd_fit::{Samples, fit_calibration};

fn options(source: RowSource, split: BitSplit) -> CalibrateOptions {
    CalibrateOptions { source, codecs: vec!["kvd-2".parse().unwrap()], split, seed: 1, dump: None }
}

/// `cargo test -p kvd-eval --test split -- --ignored`.
#[tokio::test]
#[ignore = "takes a minute of CPU time: the model reads 4096 tokens and 16 times 512"]
async fn the_fixtures_split_loses_far_less_than_the_even_one_at_no_more_bits() {
    let source = ModelSource {
        dir: None,
        texts: Vec::new(),
        tokens: 8 * 512,
        window: 512,
        block_tokens: 64,
    };
    let mut options = options(RowSource::Model(source), BitSplit::Sensitivity);
    // Costs are measured under the middle rate, kvd-2, and carried over to the others.
    options.codecs = ["kvd-4", "kvd-2", "kvd-1"].map(|name| name.parse().unwrap()).into();
    let run = run_calibration(&options).await.unwrap();
    for (index, (name, bits)) in
        [("kvd-4", 3.5..4.0), ("kvd-2", 1.8..2.2), ("kvd-1", 0.9..1.2)].into_iter().enumerate()
    {
        let said = run.splits[index].to_string();
        assert!(said.starts_with(&format!("{name}: bits shared by sensitivity: KL")), "{said}");
        let SplitVerdict::ByCosts { even, by_costs } = run.splits[index].verdict else {
            panic!("{said}")
        };
        assert!(by_costs.loss < 0.5 * even.loss, "{said}");
        assert!(by_costs.bits <= even.bits * 1.002 && bits.contains(&by_costs.bits), "{said}");
    }
    let bytes = run.artefact.unwrap().to_bytes();
    let artefact = Calibration::from_bytes(&bytes).unwrap();
    assert_eq!(artefact.parts().count(), 6);
}

fn noise(index: usize) -> f32 {
    let mut z = (index as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    let mut sum = 0.0;
    for _ in 0..3 {
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        sum += (z >> 40) as f32 / (1u64 << 24) as f32 - 0.5;
    }
    sum
}

/// One layer, two KV heads of 16 channels: scores of the first are steep, of the second flat.
fn make_dump(tokens: usize, queries: usize) -> KvDump {
    let geometry = Geometry {
        layers: 1,
        kv_heads: 2,
        head_dim_k: 16,
        head_dim_v: 16,
        block_tokens: 64,
        dtype: DType::F16,
        rope_pairing: RopePairing::Half,
    };
    let values = |seed: usize, count: usize| -> Vec<f32> {
        (0..count * 32).map(|i| noise(seed * 1_000_003 + i) * 2.0).collect()
    };
    let mut q = values(2, queries);
    for head in q.chunks_mut(32) {
        head[..16].iter_mut().for_each(|x| *x *= 8.0);
    }
    let (k, v) = (values(0, tokens), values(1, tokens));
    KvDump { geometry, query_heads: 2, layers: vec![LayerRows { k, v, q }] }
}

async fn calibrate(rows: &KvDump, split: BitSplit) -> CalibrationRun {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("rows");
    std::fs::write(&path, rows.to_bytes().unwrap()).unwrap();
    let source = DumpSource { files: vec![path], block_tokens: 64, tokens: None };
    run_calibration(&options(RowSource::Dump(source), split)).await.unwrap()
}

#[tokio::test]
async fn rows_alone_share_bits_by_attention_or_evenly_with_the_reason() {
    let run = calibrate(&make_dump(4096, 4096), BitSplit::Sensitivity).await;
    let said = run.splits[0].to_string();
    assert!(said.contains("squared error of attention"), "{said}");
    let SplitVerdict::ByCosts { even, by_costs } = run.splits[0].verdict else { panic!("{said}") };
    assert!(by_costs.loss <= 0.98 * even.loss && by_costs.bits <= 1.002 * even.bits, "{said}");

    let run = calibrate(&make_dump(4032, 4032), BitSplit::Sensitivity).await;
    let verdict = SplitVerdict::TooLittleText { tokens: 4032, needed: 4096 };
    assert_eq!(run.splits[0].verdict, verdict);
    assert!(run.splits[0].to_string().contains("4032 tokens are too few"), "{}", run.splits[0]);

    let sampled = make_dump(4096, 1024);
    let run = calibrate(&sampled, BitSplit::Sensitivity).await;
    assert_eq!(run.splits[0].verdict, SplitVerdict::QueriesWithoutTokens);
    // The even split is today's fit of all rows.
    let even = calibrate(&sampled, BitSplit::Even).await;
    assert!(even.splits.is_empty());
    let spec = kvd_codec::resolve_spec("kvd-2").unwrap();
    let fitted =
        fit_calibration(&sampled.geometry, &spec, &samples(&sampled), 1, &mut |_| {}).unwrap();
    assert!(run.artefact == even.artefact && even.artefact == Some(fitted));
}

fn samples(rows: &KvDump) -> Samples {
    let read = KvDump::from_bytes(&rows.to_bytes().unwrap(), 64).unwrap();
    let samples = read.to_samples().unwrap();
    assert_eq!(samples.rows(LayerIndex(0), Side::Key, 1).len(), 16 * rows.layers[0].k.len() / 32);
    samples
}
