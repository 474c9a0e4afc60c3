//! Questions about a stored sequence: codec, dtype, windows, caps.

use super::{
    DIM, LAYER, MODEL, Q_HEADS, QUERIES, StoredBlocks, largest_error, make_values, measure_errors,
    narrow_rows,
};
use kvd_compute::{AttendPlan, Backend, PlanQuery};
use kvd_core::{DType, RopePairing};
use std::time::Instant;

/// A codec, and a question about rows stored with it.
#[derive(Clone, Copy, Debug)]
pub struct AttendCase {
    /// The codec.
    pub text: &'static str,
    /// Channels that its rotation turns together.
    pub pairing: RopePairing,
    /// The type of rows, queries and answers.
    pub dtype: DType,
    /// Query tokens: the last that are stored.
    pub n_q: u32,
    /// As in the call.
    pub sliding_window: Option<u32>,
    /// As in the call.
    pub soft_cap: Option<f32>,
    /// Whether a part begins and ends inside its page, with a gap behind it, and a window of raw
    /// rows, fewer than its slot has, stands behind the pages.
    pub ragged: bool,
}

impl AttendCase {
    /// Three query tokens over whole pages, in f32.
    pub fn new(text: &'static str, pairing: RopePairing) -> Self {
        let (dtype, n_q) = (DType::F32, QUERIES as u32);
        Self { text, pairing, dtype, n_q, sliding_window: None, soft_cap: None, ragged: false }
    }

    /// Three query tokens over pages and a window, in f16.
    pub fn ragged_case(text: &'static str) -> Self {
        let dtype = DType::F16;
        Self { dtype, ragged: true, ..Self::new(text, RopePairing::Half) }
    }

    /// The plan over all parts, and its queries.
    pub(super) fn attend_plan(&self, stored: &StoredBlocks) -> (AttendPlan, Vec<f32>) {
        let parts: Vec<_> = stored.parts.iter().map(|part| part.plan.clone()).collect();
        let tokens = parts.last().map_or(0, |part| part.first_token + part.rows);
        let rows = self.n_q as usize * Q_HEADS;
        let (q, bytes) = narrow_rows(self.dtype, &make_values(5, rows * DIM));
        let query = PlanQuery {
            n_q: self.n_q,
            position: tokens - self.n_q,
            sliding_window: self.sliding_window,
            parts: parts.into(),
        };
        let plan = AttendPlan {
            model: MODEL,
            layer: LAYER,
            q_heads: Q_HEADS as u32,
            dtype: self.dtype,
            scale: None,
            soft_cap: self.soft_cap,
            queries: vec![query],
            q: bytes,
        };
        (plan, q)
    }
}

/// Keys of one kind, values of another: a pair that has no kernel ahead of time.
pub const LATE_CODEC: &str = "k=uniform(b=4,g=32,axis=channel); v=fp8";

/// Questions that the plain one leaves out: sliding windows inside a page and over all parts, soft
/// caps, ranges, raw rows behind pages, more and fewer query tokens, other types than f32.
pub fn list_cases() -> impl Iterator<Item = AttendCase> {
    let (window, cap) = (Some(20), Some(1.5));
    let asks = [
        AttendCase { n_q: 5, soft_cap: cap, ..AttendCase::ragged_case("raw") },
        AttendCase { dtype: DType::BF16, sliding_window: window, ..AttendCase::ragged_case("raw") },
        AttendCase { sliding_window: Some(35), soft_cap: cap, ..AttendCase::ragged_case("kivi-4") },
        AttendCase { n_q: 7, ..AttendCase::ragged_case("kivi-4") },
        AttendCase { dtype: DType::BF16, n_q: 2, ..AttendCase::ragged_case("fp8") },
        AttendCase { n_q: 1, soft_cap: cap, ..AttendCase::ragged_case("vecinfer-2") },
        AttendCase { n_q: 1, ..AttendCase::ragged_case("vq-residual-4") },
        AttendCase { n_q: 4, sliding_window: Some(60), ..AttendCase::ragged_case("vq-residual-4") },
        AttendCase { sliding_window: Some(60), ..AttendCase::ragged_case("innerq-2") },
        AttendCase { soft_cap: cap, ..AttendCase::ragged_case("turbo-4") },
        AttendCase { sliding_window: window, ..AttendCase::ragged_case("kvcomp") },
        AttendCase {
            n_q: 4,
            sliding_window: Some(60),
            soft_cap: cap,
            ..AttendCase::ragged_case("kvd-2")
        },
        AttendCase { sliding_window: Some(35), ..AttendCase::ragged_case("kvd-2-fast") },
        AttendCase {
            soft_cap: cap,
            sliding_window: Some(60),
            ..AttendCase::ragged_case(LATE_CODEC)
        },
    ];
    asks.into_iter()
}

/// How long a compiler is waited for.
const LATE_SECONDS: u64 = 120;

/// Asks for [`LATE_CODEC`] until its own kernel is there, and once more: whichever kernel answers,
/// the answer is within its bound.
pub fn check_late_kernel(backend: &mut dyn Backend, is_ready: impl Fn() -> bool) {
    let begun = Instant::now();
    let case =
        AttendCase { n_q: 4, sliding_window: Some(60), ..AttendCase::ragged_case(LATE_CODEC) };
    loop {
        let was_ready = is_ready();
        let (off, lse) = measure_errors(backend, &case).unwrap();
        let most = largest_error(LATE_CODEC);
        assert!(off < most && lse < most, "outputs {off:.1e}, log-sum-exp {lse:.1e}");
        if was_ready {
            return;
        }
        assert!(begun.elapsed().as_secs() < LATE_SECONDS, "no kernel in {LATE_SECONDS} s");
        std::thread::yield_now();
    }
}
