//! Which value sides are worth a look at their codes while they are multiplied.
//!
//! Rows whose values fail by the largest codes that there could be are judged by those that there
//! are (`loss.rs`). To find those afterwards, all pages are decoded once more; to find them on the
//! way costs a few instructions for each 64 codes. Whoever asked once will ask again: so it is kept
//! who did, until the backend ends. Answers do not depend on it.

use kvd_codec::HeadCodec;
use std::sync::atomic::{AtomicBool, Ordering};

/// Sides are told apart by so many bits of a hash.
const BUCKET_BITS: u32 = 8;

/// The sides whose codes were asked for.
pub(crate) struct ValueLooks([AtomicBool; 1 << BUCKET_BITS]);

impl Default for ValueLooks {
    fn default() -> Self {
        Self([const { AtomicBool::new(false) }; 1 << BUCKET_BITS])
    }
}

impl ValueLooks {
    /// Whether codes of the side, or of another in its bucket, were asked for.
    pub(super) fn wants_look(&self, side: &HeadCodec) -> bool {
        self.bucket_of(side).load(Ordering::Relaxed)
    }

    /// Keeps that codes of the side are asked for.
    pub(super) fn keep_asked(&self, side: &HeadCodec) {
        self.bucket_of(side).store(true, Ordering::Relaxed);
    }

    /// A side stays where it is as long as its model is registered.
    fn bucket_of(&self, side: &HeadCodec) -> &AtomicBool {
        let address = std::ptr::from_ref(side).addr() as u64;
        let hash = address.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> (u64::BITS - BUCKET_BITS);
        &self.0[hash as usize]
    }
}
