//! A backend whose every store and attend goes through memory that a worker shares with its device:
//! with it the conformance suite is one of regions.

use crate::forward::ForwardingBackend;
use crate::mount_forwarding;
use bytes::Bytes;
use kvd_compute::{
    AttendPlan, AttendTask, Attended, Backend, BackendError, DeviceRegion, IncomingRows,
    PlannedWrite, RawTarget, RegionPlaces, RegionRows, Stop, content_hash,
};
use kvd_core::{Geometry, ModelId};
use std::ops::Range;

/// Places of one call are aligned to this; what lies between them stays as it was.
const ALIGN: u64 = 64;
/// Every byte of an answer's places before it is written.
const UNWRITTEN: u8 = 0xA5;
/// Tokens that are staged at once: a region has room for them.
const STAGED_TOKENS: u32 = 10;

/// A backend whose rows, queries and answers cross a region.
pub struct InPlace<B> {
    /// The backend.
    pub backend: B,
    region: DeviceRegion,
    /// How often each call is made, all with one answer: what repeats may take another way.
    pub repeat: usize,
    /// Channels of keys and of values.
    pub head_dims: [u64; 2],
}

impl<B: Backend> InPlace<B> {
    /// Over an open region that has room for whatever is asked.
    pub fn new(backend: B, region: DeviceRegion, geometry: &Geometry) -> Self {
        let head_dims = [geometry.head_dim_k, geometry.head_dim_v].map(u64::from);
        Self { backend, region, repeat: 1, head_dims }
    }

    /// Where a plan's parts are, with a gap before each, and the lengths of its answer.
    pub fn plan_places(&self, plan: &AttendPlan) -> (RegionPlaces, [u64; 2]) {
        let bytes = |dim: u64| plan.rows() * dim * plan.dtype.size_bytes() as u64;
        let after = |end: u64| (end + 1).next_multiple_of(ALIGN);
        let q = ALIGN;
        let out = after(q + bytes(self.head_dims[0]));
        let lse = after(out + bytes(self.head_dims[1]));
        let places = RegionPlaces { region: self.region, q, out, lse };
        (places, [bytes(self.head_dims[1]), plan.rows() * 4])
    }
}

impl<B: Backend> InPlace<B> {
    /// Leaves tokens of K and V in the region, with a gap before each; where they are.
    pub fn leave_rows(
        &mut self,
        rows: &IncomingRows,
        tokens: Range<u32>,
    ) -> Result<(RegionRows, [Bytes; 2]), BackendError> {
        let (mut end, mut at, mut all) = (ALIGN, [0; 2], [Bytes::new(), Bytes::new()]);
        for (side, bytes) in [&rows.k, &rows.v].into_iter().enumerate() {
            let each = bytes.len() / rows.tokens as usize;
            all[side] = bytes.slice(each * tokens.start as usize..each * tokens.end as usize);
            at[side] = end;
            self.backend.write_region(self.region, end, &all[side])?;
            end = (end + all[side].len() as u64 + 1).next_multiple_of(ALIGN);
        }
        let tokens = tokens.end - tokens.start;
        Ok((RegionRows { region: self.region, tokens, k: at[0], v: at[1] }, all))
    }

    fn attend_once(&mut self, plan: &AttendPlan) -> Result<Attended, BackendError> {
        let (places, lengths) = self.plan_places(plan);
        self.backend.write_region(self.region, places.q, &plan.q)?;
        let end = (places.lse + lengths[1] + 1).next_multiple_of(ALIGN);
        let blank = vec![UNWRITTEN; (end - places.out) as usize];
        self.backend.write_region(self.region, places.out, &blank)?;
        let mut launched = 0;
        let without = AttendPlan { q: Bytes::new(), ..plan.clone() };
        let stored_bytes_read =
            self.backend.attend_in_place(&without, &places, &mut || launched += 1)?;
        assert_eq!(launched, 1, "launched once");
        let mut answer = blank;
        self.backend.read_region(self.region, places.out, &mut answer)?;
        let lse_at = (places.lse - places.out) as usize;
        let out = answer[..lengths[0] as usize].to_vec();
        let lse = &answer[lse_at..][..lengths[1] as usize];
        let between = answer[..lse_at].iter().skip(out.len());
        let behind = answer[lse_at + lse.len()..].iter();
        assert!(between.chain(behind).all(|byte| *byte == UNWRITTEN), "past its places");
        let lse = lse.as_chunks::<4>().0.iter().map(|value| f32::from_le_bytes(*value)).collect();
        Ok(Attended { out, lse, stored_bytes_read, saved_passes: 0 })
    }
}

mount_forwarding!(InPlace<B>, B: Backend);

impl<B: Backend> ForwardingBackend for InPlace<B> {
    type Inner = B;

    fn inner_backend(&self) -> &B {
        &self.backend
    }

    fn inner_backend_mut(&mut self) -> &mut B {
        &mut self.backend
    }

    fn write(
        &mut self,
        model: ModelId,
        rows: &IncomingRows,
        source_row: u32,
        count: u32,
        to: RawTarget,
    ) -> Result<(), BackendError> {
        let mut done = 0;
        while done < count {
            let first = source_row + done;
            let now = STAGED_TOKENS.min(count - done);
            let (places, [k, v]) = self.leave_rows(rows, first..first + now)?;
            let staged = self.backend.stage_rows(model, &places)?.expect("room for a few tokens");
            assert_eq!(staged.content_hash, content_hash(&k, &v));
            assert!(staged.finite.is_ok(), "{:?}", staged.finite);
            // The second half first: order is not what the caller promises.
            let half = |source_row: u32, rows: u32| {
                let to = RawTarget { first_row: to.first_row + done + source_row, ..to };
                PlannedWrite { source_row, rows, to }
            };
            let middle = now / 2;
            let halves = [half(middle, now - middle), half(0, middle)];
            self.backend.write_staged(&staged, &halves[..if middle > 0 { 2 } else { 1 }])?;
            done += now;
        }
        Ok(())
    }

    fn attend(&mut self, plan: &AttendPlan) -> Result<Attended, BackendError> {
        let answer = self.attend_once(plan)?;
        for _ in 1..self.repeat {
            let again = self.attend_once(plan)?;
            assert_eq!((&again.out, &again.lse), (&answer.out, &answer.lse), "asked again");
        }
        Ok(answer)
    }

    fn attend_slice(
        &mut self,
        task: &mut AttendTask,
        stop: &Stop,
    ) -> Result<Option<Attended>, BackendError> {
        task.attend_by_pieces(stop, |plan| ForwardingBackend::attend(self, plan))
    }

    fn shares_pages(&self) -> bool {
        false
    }
}
