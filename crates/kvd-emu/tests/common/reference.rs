//! Attention in f64 over what the pages decode to, with the bound that f32 arithmetic earns.

use super::Stored;
use kvd_codec::{PageReader, RowSpace, StoredLayout as StoredSide};
use kvd_compute::{AttendPlan, PlanPart, PlanQuery, Source};
use kvd_core::{LayerIndex, Side};

const LAYER: LayerIndex = LayerIndex(0);
/// Half a unit in the last place of an f32, relative.
const EPSILON: f64 = 1.0 / (1u64 << 24) as f64;
/// Between levels that two bytes hold, of the largest: docs/adr/0008-kernel-error-budget.md.
const LEVEL_STEP: f64 = 1.0 / 32_639.0;

/// The expected value of one output row.
pub(crate) struct Expected {
    pub(crate) out: Vec<f64>,
    pub(crate) lse: f64,
    /// Largest error of a value of `out`.
    pub(crate) out_bound: f64,
    /// Largest error of `lse`.
    pub(crate) lse_bound: f64,
}

/// Rows of one part, head and side, and whether they are coefficients.
fn rows(stored: &Stored, part: &PlanPart, side: Side, head: usize) -> (Vec<f32>, bool) {
    let geometry = stored.codec.geometry();
    let dim = geometry.head_dim(side);
    let mut out = vec![0f32; part.rows as usize * dim];
    match &part.source {
        Source::Raw { extent, capacity_rows, first_row } => {
            let layout = geometry.raw_layout(*capacity_rows);
            let start = extent.offset + layout.row_offset(side, head as u64, u64::from(*first_row));
            let len = u64::from(part.rows) * layout.row_bytes(side);
            geometry
                .dtype
                .widen_values(&stored.arena[start as usize..(start + len) as usize], &mut out);
            (out, false)
        }
        Source::Pages { extent, ends, first_row } => {
            let index = side.index() * geometry.kv_heads as usize + head;
            let start = if index == 0 { 0 } else { ends[index - 1] };
            let slot = &stored.arena[extent.offset as usize..];
            let bytes = &slot[start as usize..ends[index] as usize];
            let reader = PageReader::open_page(&stored.codec, LAYER, side, head, bytes).unwrap();
            reader.decode_rows(*first_row as usize, part.rows as usize, &mut out).unwrap();
            (out, reader.space() == RowSpace::Coefficient)
        }
    }
}

/// A decoded token: its key and value, and which of them are coefficients.
struct Token {
    position: u32,
    key: (Vec<f32>, bool),
    value: (Vec<f32>, bool),
}

fn tokens(stored: &Stored, query: &PlanQuery, head: usize) -> Vec<Token> {
    let mut tokens = Vec::new();
    let [dim_k, dim_v] = Side::BOTH.map(|side| stored.codec.geometry().head_dim(side));
    for part in query.parts.iter() {
        let (keys, folded_k) = rows(stored, part, Side::Key, head);
        let (values, folded_v) = rows(stored, part, Side::Value, head);
        let both = keys.chunks_exact(dim_k).zip(values.chunks_exact(dim_v));
        tokens.extend(both.zip(part.first_token..).map(|((key, value), position)| Token {
            position,
            key: (key.to_vec(), folded_k),
            value: (value.to_vec(), folded_v),
        }));
    }
    tokens
}

/// Every output row of a plan, `[tokens, query heads]`.
pub(crate) fn expected(stored: &Stored, plan: &AttendPlan) -> Vec<Expected> {
    let geometry = stored.codec.geometry();
    let dim = geometry.head_dim(Side::Key);
    let group = (plan.q_heads / geometry.kv_heads) as usize;
    let q = floats(&plan.q);
    let mut rows = q.chunks_exact(dim);
    let mut all = Vec::new();
    for query in &plan.queries {
        let heads: Vec<_> =
            (0..geometry.kv_heads as usize).map(|head| tokens(stored, query, head)).collect();
        for i in 0..query.n_q {
            let visible = query.visible(i);
            for head in 0..plan.q_heads as usize {
                let seen = heads[head / group].iter();
                let seen = seen.filter(|token| visible.contains(&token.position));
                let seen: Vec<&Token> = seen.collect();
                all.push(row(stored, plan, head / group, rows.next().unwrap(), &seen));
            }
        }
    }
    all
}

/// One output row over the tokens that it sees.
fn row(stored: &Stored, plan: &AttendPlan, head: usize, q: &[f32], seen: &[&Token]) -> Expected {
    let dim_v = stored.codec.geometry().head_dim(Side::Value);
    let scale = plan.scale.unwrap_or_else(|| 1.0 / (q.len() as f32).sqrt());
    let q: Vec<f32> = q.iter().map(|x| x * scale).collect();
    let mut folded = vec![0f32; q.len()];
    let side = stored.codec.head_codec(LAYER, Side::Key, head);
    let offset = f64::from(side.fold_query(&q, &mut folded));
    let by_levels =
        matches!(side.stored_layout(), StoredSide::Lloyd { .. } | StoredSide::Polar { .. });
    let (mut scores, mut size, mut rounded) = (Vec::new(), 0f64, 0f64);
    for token in seen {
        let (query, offset) = if token.key.1 { (&folded, offset) } else { (&q, 0.0) };
        let products = query.iter().zip(&token.key.0).map(|(q, k)| f64::from(*q) * f64::from(*k));
        size = size.max(products.clone().map(f64::abs).sum::<f64>() + offset.abs());
        if by_levels {
            let most = token.key.0.iter().fold(0f32, |most, k| most.max(k.abs()));
            let query = query.iter().map(|q| f64::from(q.abs())).sum::<f64>();
            rounded = rounded.max(LEVEL_STEP / 2.0 * f64::from(most) * query);
        }
        let score = products.sum::<f64>() + offset;
        let cap = plan.soft_cap.map(f64::from);
        scores.push(cap.map_or(score, |cap| cap * (score / cap).tanh()));
    }
    let max = scores.iter().fold(f64::NEG_INFINITY, |a, b| a.max(*b));
    let weights: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
    let total: f64 = weights.iter().sum();
    let (mut sums, mut shares) = ([vec![0f64; dim_v], vec![0f64; dim_v]], [0f64; 2]);
    let mut largest = 0f64;
    for (token, weight) in seen.iter().zip(&weights) {
        let space = usize::from(token.value.1);
        shares[space] += weight;
        for (sum, value) in sums[space].iter_mut().zip(&token.value.0) {
            *sum += weight * f64::from(*value);
            largest = largest.max(f64::from(value.abs()));
        }
    }
    let narrow = |sum: &[f64]| sum.iter().map(|x| *x as f32).collect::<Vec<f32>>();
    let mut out = narrow(&sums[0]);
    let mut spread = 1.0;
    if shares[1] > 0.0 {
        let side = stored.codec.head_codec(LAYER, Side::Value, head);
        side.unfold_value(&narrow(&sums[1]), shares[1] as f32, &mut out);
        // Errors of coefficients add up in a row: a rotation has entries of at most 1 and `dim` of
        // them, and smoothing factors of these rows stay below 4.
        spread = if side.is_identity() { 1.0 } else { 4.0 * (dim_v as f64).sqrt() };
    }
    // A sum of n products in f32 is off by at most (n + 2) epsilon of the sum of their sizes; an
    // exponential of a score that is off by e by a factor 1 ± (e + 4 epsilon); and a row's split,
    // merge and division are a few roundings more.
    let score_error = (q.len() as f64 + 8.0) * EPSILON * size.max(1.0) + rounded;
    let sum_error = (seen.len() as f64 + 16.0) * EPSILON;
    Expected {
        out: out.iter().map(|x| f64::from(*x) / total.max(f64::MIN_POSITIVE)).collect(),
        lse: if seen.is_empty() { f64::NEG_INFINITY } else { max + total.ln() },
        out_bound: (2.0 * score_error + 2.0 * sum_error) * largest * spread,
        lse_bound: score_error + sum_error + 2.0 * EPSILON * max.abs(),
    }
}

/// Little-endian f32 values.
pub(crate) fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
}

/// Compares an answer with the expected one, row by row.
pub(crate) fn check(answer: &kvd_compute::Attended, wanted: &[Expected], what: &str) {
    let dim = answer.out.len() / 4 / wanted.len();
    let out = floats(&answer.out);
    assert_eq!(answer.lse.len(), wanted.len(), "{what}");
    for (index, (row, wanted)) in out.chunks_exact(dim).zip(wanted).enumerate() {
        let lse = f64::from(answer.lse[index]);
        let near = lse == wanted.lse || (lse - wanted.lse).abs() <= wanted.lse_bound;
        let (is, bound) = (wanted.lse, wanted.lse_bound);
        assert!(near, "{what}: row {index}: lse {lse} is not {is} within {bound:e}");
        for (channel, (value, exact)) in row.iter().zip(&wanted.out).enumerate() {
            let error = (f64::from(*value) - exact).abs();
            let bound = wanted.out_bound;
            assert!(
                error <= bound,
                "{what}: row {index}, channel {channel}: {value} is not {exact} within {bound:e}"
            );
        }
    }
}
