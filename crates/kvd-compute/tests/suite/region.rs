//! A backend whose every attend goes through memory that a worker shares with its device: with it
//! the conformance suite is one of regions.

use bytes::Bytes;
use kvd_codec::ModelCodec;
use kvd_compute::{
    AttendPlan, Attended, Backend, BackendError, DeviceInfo, DeviceRegion, EncodeSource,
    EncodedPages, IncomingRows, LoadPlan, LoadedRows, ModelBytes, RawTarget, RegionPlaces, Source,
};
use kvd_core::{Extent, Geometry, LayerIndex, ModelId};

/// Places of one call are aligned to this; what lies between them stays as it was.
const ALIGN: u64 = 64;
/// What every byte of an answer's places is before it.
const UNWRITTEN: u8 = 0xA5;

pub(crate) struct InPlace<B> {
    pub(crate) backend: B,
    region: DeviceRegion,
    /// How often each call is made, all with one answer: what repeats may take another way.
    pub(crate) repeat: usize,
    /// Channels of keys and of values.
    pub(crate) head_dims: [u64; 2],
}

impl<B: Backend> InPlace<B> {
    /// Over an open region that has room for whatever is asked.
    pub(crate) fn new(backend: B, region: DeviceRegion, geometry: &Geometry) -> Self {
        let head_dims = [geometry.head_dim_k, geometry.head_dim_v].map(u64::from);
        Self { backend, region, repeat: 1, head_dims }
    }

    /// Where a plan's parts are, with a gap before each, and the lengths of its answer.
    pub(crate) fn places(&self, plan: &AttendPlan) -> (RegionPlaces, [u64; 2]) {
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
    fn attend_once(&mut self, plan: &AttendPlan) -> Result<Attended, BackendError> {
        let (places, lengths) = self.places(plan);
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
        Ok(Attended { out, lse, stored_bytes_read })
    }
}

impl<B: Backend> Backend for InPlace<B> {
    fn attend(&mut self, plan: &AttendPlan) -> Result<Attended, BackendError> {
        let answer = self.attend_once(plan)?;
        for _ in 1..self.repeat {
            let again = self.attend_once(plan)?;
            assert_eq!((&again.out, &again.lse), (&answer.out, &answer.lse), "asked again");
        }
        Ok(answer)
    }

    fn info(&self) -> DeviceInfo {
        self.backend.info()
    }
    fn supports(&self, codec: &ModelCodec) -> Result<(), BackendError> {
        self.backend.supports(codec)
    }
    fn failure(&self) -> Option<&str> {
        self.backend.failure()
    }
    fn register(&mut self, model: ModelId, codec: ModelCodec) {
        self.backend.register(model, codec);
    }
    fn unregister(&mut self, model: ModelId) {
        self.backend.unregister(model);
    }
    fn model_bytes(&self, model: ModelId) -> Result<ModelBytes, BackendError> {
        self.backend.model_bytes(model)
    }
    fn check(&self, model: ModelId, rows: &IncomingRows) -> Result<(), BackendError> {
        self.backend.check(model, rows)
    }
    fn write(
        &mut self,
        model: ModelId,
        rows: &IncomingRows,
        source_row: u32,
        count: u32,
        to: RawTarget,
    ) -> Result<(), BackendError> {
        self.backend.write(model, rows, source_row, count, to)
    }
    fn copy(
        &mut self,
        model: ModelId,
        layer: LayerIndex,
        from: &Source,
        count: u32,
        to: RawTarget,
    ) -> Result<(), BackendError> {
        self.backend.copy(model, layer, from, count, to)
    }
    fn encode(
        &mut self,
        model: ModelId,
        layer: LayerIndex,
        blocks: &[EncodeSource],
    ) -> Result<Vec<Result<EncodedPages, BackendError>>, BackendError> {
        self.backend.encode(model, layer, blocks)
    }
    fn place(&mut self, pages: &EncodedPages, to: Extent) {
        self.backend.place(pages, to);
    }
    fn load(&mut self, plan: &LoadPlan) -> Result<LoadedRows, BackendError> {
        self.backend.load(plan)
    }
}
