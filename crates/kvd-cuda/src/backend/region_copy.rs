//! K and V of a worker's memory, copied within the device and written from that copy: what comes to
//! the host is a check of each thread block.

use super::region::RegionValues;
use super::{CudaBackend, device_error};
use crate::abi::{REGION_THREADS, RowsParameters, RowsUnit, StageCheck, StageParameters};
use crate::driver::KernelLaunch;
use kvd_compute::{BackendError, PlannedWrite, RawTarget, RegionRows, StagedRows, content_hash_of};
use kvd_core::{DType, ErrorCode, Geometry, ModelId, Side};

/// A copy in scratch memory, until that is given back.
pub(super) struct RegionCopy {
    geometry: Geometry,
    tokens: u32,
    /// By side.
    rows: [u64; 2],
    /// Room for so many units of `kvd_rows`, and where.
    units_max: u64,
    units: u64,
    /// Whether a kernel may still be reading units there.
    written: bool,
}

impl CudaBackend {
    pub(super) fn stage_rows(
        &mut self,
        model: ModelId,
        rows: &RegionRows,
    ) -> Result<Option<StagedRows>, BackendError> {
        let geometry = self.model_codec(model)?.geometry().clone();
        let (tokens, each) = (rows.tokens, geometry.dtype.size_bytes());
        let per_head = u64::from(tokens) * u64::from(geometry.kv_heads);
        let values = Side::BOTH.map(|side| per_head * geometry.head_dim(side) as u64);
        let offsets = [rows.k, rows.v];
        let find = |side: Side| {
            let (offset, count) = (offsets[side.index()], values[side.index()]);
            let bytes_each = each;
            self.regions.find_values(rows.region, offset, RegionValues { count, bytes_each })
        };
        let from = [find(Side::Key)?, find(Side::Value)?];
        // A kernel says by a word which of the values is none.
        if values.iter().any(|values| *values >= u64::from(u32::MAX)) {
            return Ok(None);
        }
        let mut plan =
            StageParameters::new(values.map(|values| values * each as u64), geometry.dtype);
        self.clear_scratch();
        let Some(staged) = self.place_stage(&mut plan, geometry, tokens, from) else {
            return Ok(None);
        };
        self.device.launch_kernel(KernelLaunch {
            kernel: "kvd_stage",
            blocks: plan.thread_blocks(),
            threads: REGION_THREADS,
            shared_bytes: StageParameters::SHARED_BYTES,
            parameters: bytemuck::bytes_of(&plan),
        })?;
        let mut checks = vec![StageCheck::default(); plan.thread_blocks() as usize];
        self.device.download_scratch(plan.checks, bytemuck::cast_slice_mut(&mut checks))?;
        let (sum, first_bad) = plan.read_checks(&checks);
        let content_hash = content_hash_of(sum, plan.sides.map(|side| side.bytes));
        let bad = Side::BOTH.into_iter().find_map(|side| first_bad[side.index()].zip(Some(side)));
        let finite = match bad {
            None => Ok(()),
            Some((index, side)) => Err(self.bad_value(&staged, side, index as usize)?),
        };
        self.held.staged = Some(staged);
        Ok(Some(StagedRows { call: self.held.call, content_hash, finite }))
    }

    /// Takes scratch memory for a copy, its checks, and the units that write it.
    fn place_stage(
        &mut self,
        plan: &mut StageParameters,
        geometry: Geometry,
        tokens: u32,
        from: [u64; 2],
    ) -> Option<RegionCopy> {
        let mut rows = [0; 2];
        for side in Side::BOTH {
            let to = self.device.take_scratch(plan.copy_bytes(side))?;
            plan.set_side(side, from[side.index()], to);
            rows[side.index()] = to;
        }
        plan.checks = self
            .device
            .take_scratch(u64::from(plan.thread_blocks()) * size_of::<StageCheck>() as u64)?;
        let units_max = RowsUnit::units_max(&geometry, tokens);
        let units = self.device.take_scratch(units_max * size_of::<RowsUnit>() as u64)?;
        Some(RegionCopy { geometry, tokens, rows, units_max, units, written: false })
    }

    /// The error for a copied value that is not finite.
    fn bad_value(
        &mut self,
        staged: &RegionCopy,
        side: Side,
        index: usize,
    ) -> Result<BackendError, BackendError> {
        let dtype = staged.geometry.dtype;
        let (mut bytes, mut value) = ([0; DType::F32.size_bytes()], [0f32]);
        let bytes = &mut bytes[..dtype.size_bytes()];
        self.device
            .download_scratch(staged.rows[side.index()] + (index * bytes.len()) as u64, bytes)?;
        dtype.widen_values(bytes, &mut value);
        Ok(BackendError::non_finite(&staged.geometry, side, index, value[0]))
    }

    pub(super) fn write_rows(
        &mut self,
        staged: &StagedRows,
        writes: &[PlannedWrite],
    ) -> Result<(), BackendError> {
        let known = self.held.staged.as_mut().filter(|_| staged.call == self.held.call);
        let Some(RegionCopy { geometry, tokens, rows, units_max, units, written }) = known else {
            return Err(device_error(
                ErrorCode::Internal,
                "rows are written that are no longer staged",
            ));
        };
        let past = |write: &PlannedWrite| {
            let ends_after = |first: u32, end: u32| end.checked_sub(write.rows) < Some(first);
            let RawTarget { capacity_rows, first_row, .. } = write.to;
            ends_after(write.source_row, *tokens) || ends_after(first_row, capacity_rows)
        };
        let table = RowsUnit::from_writes(geometry, writes, *rows, self.device.arena());
        if writes.iter().any(past) || table.len() as u64 > *units_max {
            let message = format!("{} writes of {tokens} staged tokens", writes.len());
            return Err(device_error(ErrorCode::Internal, message));
        }
        // The kernel writes where the layout says, not where the extent ends.
        for RawTarget { extent, capacity_rows, .. } in writes.iter().map(|write| write.to) {
            let bytes = geometry.raw_layout(capacity_rows).size_bytes();
            if bytes > extent.len {
                let message = format!("a slot of {} bytes for rows of {bytes}", extent.len);
                return Err(device_error(ErrorCode::Internal, message));
            }
        }
        let ends = writes.iter().map(|write| write.to.extent.end());
        assert!(ends.max().unwrap_or(0) <= self.device.arena_bytes(), "rows past the arena");
        let parameters =
            RowsParameters { units: *units, align: RowsUnit::common_alignment(&table), unused: 0 };
        // Staging was waited for, so that nothing reads where units go: they need not wait for what
        // was launched since, a copy of the tail. A second write's take the place of the first's.
        let units_bytes = bytemuck::cast_slice(&table);
        if std::mem::replace(written, true) {
            self.device.rewrite_scratch(*units, units_bytes)?;
        } else {
            self.device.upload_scratch(*units, units_bytes)?;
        }
        self.device.launch_kernel(KernelLaunch {
            kernel: "kvd_rows",
            blocks: table.len() as u32,
            threads: REGION_THREADS,
            shared_bytes: 0,
            parameters: bytemuck::bytes_of(&parameters),
        })
    }
}
