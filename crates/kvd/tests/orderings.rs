//! The orderings that the papers report and the fixture bears out. Minutes, even in release:
//! `cargo nextest run --release -p kvd --test orderings --run-ignored all`. The page with every
//! claim, those that do not hold too, is `docs/orderings.md`.
#![cfg(feature = "eval")]

mod support;

use kvd_eval::eval::{self, EvalCodec, EvalOptions, Windows};

/// Claims that must hold, by how they begin.
const HOLD: &[&str] = &[
    "smooth+hadamard beats either and neither at 2 bits",
    "VecInfer beats KIVI",
    "Huffman saves bits",
    "kvd-2 beats every other",
];

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes minutes: nine codecs on two passages of 2048 tokens, with calibrations"]
async fn what_the_papers_order_is_ordered_so() {
    let running =
        support::start(&[("device.pool_bytes", "256 MiB"), ("device.threads", "2")]).await;
    let endpoint = format!("http://{}", running.addresses().tcp.unwrap()).parse().unwrap();
    let compared = ["vq-2", "vecinfer-2", "kivi-1", "kivi-2", "kvcomp", "kvd-2"];
    let needed = |codec: &EvalCodec| compared.iter().any(|name| codec.label.starts_with(name));
    let codecs = EvalCodec::orderings().into_iter().filter(needed).collect();
    let windows = vec![Windows::Same { sink: 32, recent: 96 }];
    let options = EvalOptions { windows, ..EvalOptions::new(endpoint, codecs) };
    let report = eval::run(&options).await.unwrap();
    running.drain().await;
    let found = eval::orderings(&report.blocks[0]);
    for claim in HOLD {
        let ordering = found.iter().find(|ordering| ordering.claim.starts_with(claim));
        let ordering = ordering.unwrap_or_else(|| panic!("{claim} was not decided: {found:#?}"));
        assert!(ordering.holds, "{ordering:#?}");
    }
}
