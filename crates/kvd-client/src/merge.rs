//! Joining partial attention: the daemon's stored tokens with the engine's own newest ones.
//!
//! A partial result is `out`, the softmax-weighted mean of the values it saw, and `lse`, the
//! natural log of the sum of `exp(score)`. Two partials over disjoint tokens join exactly:
//! `lse = ln(exp(a) + exp(b))`, `out = exp(a - lse) * out_a + exp(b - lse) * out_b`. A partial that
//! saw nothing has `lse = -inf` and `out = 0` and leaves the other as it is, bit for bit.

/// A partial result to merge into: `lse` is `[rows, q_heads]`, `out` is
/// `[rows, q_heads, head_dim]`.
#[derive(Debug)]
pub struct PartialResult<'a> {
    /// Weighted means.
    pub out: &'a mut [f32],
    /// Log-sum-exp.
    pub lse: &'a mut [f32],
}

/// A partial result to merge from, of the same shape.
#[derive(Clone, Copy, Debug)]
pub struct PartialView<'a> {
    /// Weighted means.
    pub out: &'a [f32],
    /// Log-sum-exp.
    pub lse: &'a [f32],
}

/// Merges `from` into `into`.
///
/// # Panics
/// When the two shapes differ, or `out` is not a whole number of heads.
pub fn merge_partial(into: &mut PartialResult<'_>, from: PartialView<'_>) {
    assert_eq!(into.lse.len(), from.lse.len(), "merge: rows and heads differ");
    assert_eq!(into.out.len(), from.out.len(), "merge: head sizes differ");
    let heads = into.lse.len();
    if heads == 0 {
        return;
    }
    assert_eq!(into.out.len() % heads, 0, "merge: out is not [rows, q_heads, head_dim]");
    let head_dim = into.out.len() / heads;
    for head in 0..heads {
        let range = head * head_dim..(head + 1) * head_dim;
        merge_head(
            (&mut into.out[range.clone()], &mut into.lse[head]),
            (&from.out[range], from.lse[head]),
        );
    }
}

fn merge_head((out_a, a): (&mut [f32], &mut f32), (out_b, b): (&[f32], f32)) {
    // Empty partials are handled apart: -inf - -inf is NaN.
    if b == f32::NEG_INFINITY {
        return;
    }
    if *a == f32::NEG_INFINITY {
        out_a.copy_from_slice(out_b);
        *a = b;
        return;
    }
    let max = a.max(b);
    // One of the two is 1, so the sum neither overflows nor vanishes.
    let (weight_a, weight_b) = ((*a - max).exp(), (b - max).exp());
    let sum = weight_a + weight_b;
    let (weight_a, weight_b) = (weight_a / sum, weight_b / sum);
    for (x, y) in out_a.iter_mut().zip(out_b) {
        *x = weight_a * *x + weight_b * y;
    }
    *a = max + sum.ln();
}

#[cfg(test)]
mod tests {
    use super::*;

    type Owned = (Vec<f32>, Vec<f32>);
    const EMPTY: f32 = f32::NEG_INFINITY;

    fn merged(a: &Owned, b: &Owned) -> Owned {
        let (mut out, mut lse) = a.clone();
        let mut into = PartialResult { out: &mut out, lse: &mut lse };
        merge_partial(&mut into, PartialView { out: &b.0, lse: &b.1 });
        (out, lse)
    }

    /// Attention with one-channel values over `tokens` of (score, value), in f64.
    fn attend(tokens: &[(f64, f64)]) -> (f64, f64) {
        let max = tokens.iter().fold(f64::NEG_INFINITY, |max, token| max.max(token.0));
        let sum: f64 = tokens.iter().map(|token| (token.0 - max).exp()).sum();
        let out: f64 = tokens.iter().map(|token| (token.0 - max).exp() / sum * token.1).sum();
        (out, max + sum.ln())
    }

    fn partial(tokens: &[(f64, f64)]) -> Owned {
        if tokens.is_empty() {
            return (vec![0.0], vec![EMPTY]);
        }
        let (out, lse) = attend(tokens);
        (vec![out as f32], vec![lse as f32])
    }

    /// A fixed sequence of numbers in [-1, 1).
    fn noise(index: u64) -> f64 {
        let bits = (index + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        ((bits ^ (bits >> 29)).wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 11) as f64
            / (1u64 << 52) as f64
            - 1.0
    }

    #[test]
    fn parts_merge_to_the_whole_in_any_order() {
        for case in 0..200 {
            let token = |i: u64| (noise(case * 64 + 2 * i) * 6.0, noise(case * 64 + 2 * i + 1));
            let tokens: Vec<_> = (0..12).map(token).collect();
            let (cut1, cut2) = (case as usize % 13, case as usize / 13 % 13);
            let (cut1, cut2) = (cut1.min(cut2), cut1.max(cut2));
            let parts = [&tokens[..cut1], &tokens[cut1..cut2], &tokens[cut2..]].map(partial);
            let left = merged(&merged(&parts[0], &parts[1]), &parts[2]);
            let right = merged(&parts[0], &merged(&parts[1], &parts[2]));
            let (out, lse) = attend(&tokens);
            for (got_out, got_lse) in [&left, &right] {
                assert!((f64::from(got_out[0]) - out).abs() < 1e-6, "case {case}");
                assert!((f64::from(got_lse[0]) - lse).abs() < 2e-6, "case {case}");
            }
            assert!((left.0[0] - right.0[0]).abs() < 1e-6, "case {case}");
            assert!((left.1[0] - right.1[0]).abs() < 2e-6, "case {case}");
        }
    }

    #[test]
    fn empty_leaves_the_other_unchanged() {
        let full = (vec![0.1, -0.2, 0.3, 7.0], vec![-80.5, 3.25]);
        let empty = (vec![0.0; 4], vec![EMPTY; 2]);
        assert_eq!(merged(&full, &empty), full);
        assert_eq!(merged(&empty, &full), full);
        assert_eq!(merged(&empty, &empty), empty);
    }

    #[test]
    fn emptiness_is_decided_per_head() {
        let a = (vec![1.0, 2.0], vec![0.0, EMPTY]);
        let b = (vec![9.0, 4.0], vec![EMPTY, -1.0]);
        assert_eq!(merged(&a, &b), (vec![1.0, 4.0], vec![0.0, -1.0]));
    }

    #[test]
    fn huge_differences_keep_the_larger_part() {
        let large = (vec![0.5], vec![3.0e38]);
        let small = (vec![-2.0], vec![-3.0e38]);
        assert_eq!(merged(&large, &small), large);
        assert_eq!(merged(&small, &large), large);
        let far = (vec![1.0], vec![-2.0e4]);
        let near = (vec![3.0], vec![-2.0e4]);
        let (out, lse) = merged(&far, &near);
        assert_eq!(out, [2.0]);
        assert!((lse[0] - (-2.0e4 + 2f32.ln())).abs() < 2e-3);
    }

    #[test]
    fn no_rows_is_fine() {
        assert_eq!(merged(&(vec![], vec![]), &(vec![], vec![])), (vec![], vec![]));
    }
}
