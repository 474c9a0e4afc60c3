//! Questions about a stored sequence.

use super::{
    DIM, LAYER, MODEL, Q_HEADS, QUERIES, Stored, errors_of, largest_error, narrowed, values,
};
use kvd_compute::{AttendPlan, Backend, PlanQuery};
use kvd_core::{DType, RopePairing};
use std::time::Instant;

/// A codec, and a question about rows stored with it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ask {
    pub(crate) text: &'static str,
    pub(crate) pairing: RopePairing,
    /// The type of rows, queries and answers.
    pub(crate) dtype: DType,
    /// Query tokens: the last that are stored.
    pub(crate) n_q: u32,
    pub(crate) sliding_window: Option<u32>,
    pub(crate) soft_cap: Option<f32>,
    /// Whether a part begins and ends inside its page, with a gap behind it, and a window of raw
    /// rows, fewer than its slot has, stands behind the pages.
    pub(crate) ragged: bool,
}

impl Ask {
    /// Three query tokens over whole pages, in f32.
    pub(crate) fn new(text: &'static str, pairing: RopePairing) -> Self {
        let (dtype, n_q) = (DType::F32, QUERIES as u32);
        Self { text, pairing, dtype, n_q, sliding_window: None, soft_cap: None, ragged: false }
    }

    /// Three query tokens over pages and a window, in f16.
    pub(crate) fn ragged(text: &'static str) -> Self {
        let dtype = DType::F16;
        Self { dtype, ragged: true, ..Self::new(text, RopePairing::Half) }
    }

    /// The plan over all parts, and its queries.
    pub(super) fn plan(&self, stored: &Stored) -> (AttendPlan, Vec<f32>) {
        let parts: Vec<_> = stored.parts.iter().map(|part| part.plan.clone()).collect();
        let tokens = parts.last().map_or(0, |part| part.first_token + part.rows);
        let rows = self.n_q as usize * Q_HEADS;
        let (q, bytes) = narrowed(self.dtype, &values(5, rows * DIM));
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
pub(crate) const LATE: &str = "k=uniform(b=4,g=32,axis=channel); v=fp8";

/// Questions that the plain one leaves out: sliding windows inside a page and over all parts, soft
/// caps, ranges, raw rows behind pages, more and fewer query tokens, other types than f32.
pub(crate) fn asks() -> impl Iterator<Item = Ask> {
    let (window, cap) = (Some(20), Some(1.5));
    let asks = [
        Ask { n_q: 5, soft_cap: cap, ..Ask::ragged("raw") },
        Ask { dtype: DType::BF16, sliding_window: window, ..Ask::ragged("raw") },
        Ask { sliding_window: Some(35), soft_cap: cap, ..Ask::ragged("kivi-4") },
        Ask { n_q: 7, ..Ask::ragged("kivi-4") },
        Ask { dtype: DType::BF16, n_q: 2, ..Ask::ragged("fp8") },
        Ask { n_q: 1, soft_cap: cap, ..Ask::ragged("vecinfer-2") },
        Ask { n_q: 1, ..Ask::ragged("vq-residual-4") },
        Ask { n_q: 4, sliding_window: Some(60), ..Ask::ragged("vq-residual-4") },
        Ask { sliding_window: Some(60), ..Ask::ragged("innerq-2") },
        Ask { soft_cap: cap, ..Ask::ragged("turbo-4") },
        Ask { sliding_window: window, ..Ask::ragged("kvcomp") },
        Ask { n_q: 4, sliding_window: Some(60), soft_cap: cap, ..Ask::ragged("kvd-2") },
        Ask { sliding_window: Some(35), ..Ask::ragged("kvd-2-fast") },
        Ask { soft_cap: cap, sliding_window: Some(60), ..Ask::ragged(LATE) },
    ];
    asks.into_iter()
}

/// How long a compiler is waited for.
const LATE_SECONDS: u64 = 120;

/// Asks for [`LATE`] until its own kernel is there, and once more: whichever kernel answers, the
/// answer is within its bound.
pub(crate) fn late(backend: &mut dyn Backend, is_ready: impl Fn() -> bool) {
    let begun = Instant::now();
    let ask = Ask { n_q: 4, sliding_window: Some(60), ..Ask::ragged(LATE) };
    loop {
        let was_ready = is_ready();
        let (off, lse) = errors_of(backend, &ask).unwrap();
        let most = largest_error(LATE);
        assert!(off < most && lse < most, "outputs {off:.1e}, log-sum-exp {lse:.1e}");
        if was_ready {
            return;
        }
        assert!(begun.elapsed().as_secs() < LATE_SECONDS, "no kernel in {LATE_SECONDS} s");
        std::thread::yield_now();
    }
}
