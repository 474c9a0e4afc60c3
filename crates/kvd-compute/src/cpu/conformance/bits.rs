//! Under `fast` sums of products are exact integers, and softmax rounds alike everywhere: answers
//! have the same bits whatever multiplies, where a side keeps nothing else in f32.

use super::*;

/// Codecs whose answers over full tiles have the same bits on every instruction set.
const SAME_ANSWERS: &[&str] = &[
    "k=hadamard/uniform(b=3,axis=block); v=hadamard/uniform(b=5,g=32,axis=channel)",
    "k=smooth+hadamard/vq(d=2,b=4); v=vq(d=2,b=4)",
    "vecinfer-2",
    "k=vq(d=2,b=6); v=vq(d=4,b=7)",
    "kvd-2",
    "kvd-4",
    "k=mean+qpca/grid(rate=4)/huffman; v=hadamard/grid(rate=1)/huffman",
    "k=vq(d=2,b=4); v=gain/vq(d=2,b=4)",
    "k=norm/uniform(b=3,g=16,axis=token); v=uniform(b=2,axis=channel,mode=sym)",
    "k=uniform(b=3,axis=channel,mode=sym); v=uniform(b=4,g=32,axis=token,mode=sym)",
    "k=uniform(b=2,axis=token,mode=sym); v=uniform(b=3,axis=block,mode=sym)",
    "k=vq(d=2,b=4)/huffman; v=vq(d=2,b=4)/huffman",
    "k=hadamard/lloyd(b=4)/huffman; v=vq(d=2,b=4)",
    "k=hadamard/lloyd(b=6); v=hadamard+gain/lloyd(b=3)",
];

/// The same of scores; what their values sum beside codes, such as minima, is f32.
const SAME_SCORES: &[&str] = &["kvcomp", "turbo-4", "polar-4+4", "polar-4+2"];

#[test]
fn answers_of_exact_sums_have_the_same_bits_on_every_instruction_set() {
    for dim in [64, 128] {
        for name in SAME_ANSWERS.iter().chain(SAME_SCORES) {
            let geometry = geometry(dim);
            let (mut backend, parts) = filled(codec(&geometry, name), Data::Normal);
            // Rows in f32, of the tail and of a tile that is not full, are summed as registers are
            // wide.
            let parts = &parts[..2];
            for group in [3, 8] {
                let ask = Ask { group, n_q: 1, position: 127, window: None, cap: None };
                let plan = plan(&geometry, parts, Data::Normal, ask);
                let mut first = None;
                for simd in Simd::available() {
                    backend.limit(simd.level()).unwrap();
                    let mut scores = vec![0f32; 128 * HEADS * group];
                    backend.key_scores(&plan, &mut scores).unwrap();
                    let answer = backend.attend(&plan).unwrap();
                    let out = if SAME_ANSWERS.contains(name) { answer.out } else { Vec::new() };
                    let bits = |values: &[f32]| values.iter().map(|x| x.to_bits()).collect();
                    let got: (Vec<u32>, Vec<u32>, _) = (bits(&scores), bits(&answer.lse), out);
                    let (set, expected) = first.get_or_insert_with(|| (simd, got.clone()));
                    let context = format!("{name}, {dim}, {group}: {simd:?} and {set:?}");
                    assert!(got.0 == expected.0, "{context}: scores");
                    assert!(got.1 == expected.1, "{context}: log-sum-exps");
                    assert!(got.2 == expected.2, "{context}: outputs");
                }
            }
        }
    }
}
