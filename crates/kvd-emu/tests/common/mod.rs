//! Stored sequences, kernels run on them, and the expected answers.
#![allow(dead_code, reason = "each test file uses its own part")]

pub(crate) mod compare;
pub(crate) mod late;
pub(crate) mod levels;
pub(crate) mod reference;
pub(crate) mod run;
pub(crate) mod store;
pub(crate) mod store_run;

pub(crate) use store::{Layout, Stored, geometry, noise};

use bytes::Bytes;
use kvd_compute::{AttendPlan, PlanQuery};
use kvd_core::{DType, LayerIndex, ModelId};
use kvd_emu::{ThreadOrder, is_sanitized};

/// Orders of threads to run everything in. ThreadSanitizer reports a race in whatever order its
/// threads run, and takes ten times as long: one there.
pub(crate) fn orders() -> impl Iterator<Item = ThreadOrder> + Clone {
    let all = if is_sanitized("thread") { &ThreadOrder::EACH[2..] } else { &ThreadOrder::EACH[..] };
    all.iter().copied()
}

/// A test's query over a stored sequence.
#[derive(Clone, Debug)]
pub(crate) struct Ask {
    pub(crate) group: usize,
    /// Query tokens and the position of the first, by query.
    pub(crate) queries: Vec<(u32, u32)>,
    pub(crate) window: Option<u32>,
    pub(crate) soft_cap: Option<f32>,
}

impl Ask {
    /// One query token after everything that is stored.
    pub(crate) fn last(group: usize, tokens: u32) -> Self {
        Self { group, queries: vec![(1, tokens - 1)], window: None, soft_cap: None }
    }

    /// The plan over all parts of `stored`, with queries from `value(i)`.
    pub(crate) fn plan(&self, stored: &Stored, value: impl Fn(usize) -> f32) -> AttendPlan {
        let geometry = stored.codec.geometry();
        let q_heads = self.group as u32 * geometry.kv_heads;
        let rows: u32 = self.queries.iter().map(|query| query.0 * q_heads).sum();
        let values = (0..rows as usize * geometry.head_dim_k as usize).map(value);
        let q: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
        let query = |(n_q, position): &(u32, u32)| PlanQuery {
            n_q: *n_q,
            position: *position,
            sliding_window: self.window,
            parts: stored.parts.clone().into(),
        };
        AttendPlan {
            model: ModelId(1),
            layer: LayerIndex(0),
            q_heads,
            dtype: DType::F32,
            scale: None,
            soft_cap: self.soft_cap,
            queries: self.queries.iter().map(query).collect(),
            q: Bytes::from(q),
        }
    }
}
