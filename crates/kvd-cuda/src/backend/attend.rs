//! Attention on the device: tables up, launches, merge, results down.

use super::graphs::LaunchNode;
use super::memory::DeviceMemory;
use super::{CudaBackend, device_error};
use crate::abi::{ATTEND_THREADS, AttendParameters, MERGE_THREADS, MergeParameters};
use crate::{AttendTables, LaunchChoices, MergedResults, merge_shared_bytes};
use kvd_compute::{AttendPlan, Attended, BackendError};
use kvd_core::{ErrorCode, Side};

/// Where the tables of a plan lie on the device.
pub(super) struct PlanAddresses {
    pages: u64,
    ends: u64,
    partials: u64,
    /// Address of [`AttendTables::turns`].
    pub(super) turns: u64,
    units: Vec<u64>,
    /// And offsets behind them.
    pub(super) queries: u64,
    pub(super) offsets: u64,
    /// A word per turn.
    pub(super) first_bad: u64,
    out: u64,
    stats: u64,
    /// And results behind them.
    pub(super) sums: u64,
}

impl PlanAddresses {
    /// Where results are, behind the sums of so many rows.
    pub(super) fn results_address(&self, rows: usize, dim: usize) -> u64 {
        self.sums + (rows * 2 * dim * 4) as u64
    }
}

impl CudaBackend {
    /// Answers a plan, in halves when the scratch memory is too small for it at once.
    pub(super) fn attend_all(&mut self, plan: &AttendPlan) -> Result<Attended, BackendError> {
        let tables = self.build_tables(plan, false)?;
        let dims = self.row_dims(plan)?;
        self.clear_scratch();
        if let Some(placed) = self.allocate_tables(&tables, dims) {
            return self.run_attention(plan, &tables, &placed, dims[1]);
        }
        let (first, second) = self.halve_plan(plan)?;
        let mut answer = self.attend_all(&first)?;
        let rest = self.attend_all(&second)?;
        answer.out.extend(rest.out);
        answer.lse.extend(rest.lse);
        answer.stored_bytes_read += rest.stored_bytes_read;
        Ok(answer)
    }

    /// Channels of keys and of values.
    pub(super) fn row_dims(&self, plan: &AttendPlan) -> Result<[usize; 2], BackendError> {
        let geometry = self.model_codec(plan.model)?.geometry();
        Ok(Side::BOTH.map(|side| geometry.head_dim(side)))
    }

    /// Two plans for one that is over the scratch memory.
    pub(super) fn halve_plan(
        &self,
        plan: &AttendPlan,
    ) -> Result<(AttendPlan, AttendPlan), BackendError> {
        if plan.queries.len() < 2 {
            let message = "one query's block table and partial results are over the scratch memory \
                           of the GPU; ask for fewer query tokens at once";
            return Err(device_error(ErrorCode::LimitExceeded, message));
        }
        let [dim, _] = self.row_dims(plan)?;
        let row_bytes = plan.q_heads as usize * dim * plan.dtype.size_bytes();
        let (first, second) = plan.queries.split_at(plan.queries.len() / 2);
        let rows: usize = first.iter().map(|query| query.n_q as usize).sum();
        let half = |queries: &[_], q| AttendPlan { queries: queries.to_vec(), q, ..plan.clone() };
        // None where they are in a worker's memory.
        let cut = (rows * row_bytes).min(plan.q.len());
        Ok((half(first, plan.q.slice(..cut)), half(second, plan.q.slice(cut..))))
    }

    /// The plan's tables.
    pub(super) fn build_tables(
        &mut self,
        plan: &AttendPlan,
        in_place: bool,
    ) -> Result<AttendTables, BackendError> {
        let kv_heads = self.model_codec(plan.model)?.geometry().kv_heads;
        let rows = LaunchChoices::largest_unit_rows(plan, kv_heads);
        self.bring_layer(plan.model, plan.layer, Some(rows))?;
        let codec = self.model_codec(plan.model)?;
        let header = |offset: u64| self.headers.get(&offset).copied();
        let (choices, shapes) = &self.models[&plan.model].layers[&plan.layer].by_rows[&rows];
        let options = choices.table_options(plan, kv_heads);
        let new = if in_place { AttendTables::in_place } else { AttendTables::new };
        Ok(new(plan, codec, shapes, &header, options)?)
    }

    /// Finds scratch memory for everything; `None` when it is too little.
    pub(super) fn allocate_tables(
        &mut self,
        tables: &AttendTables,
        dims: [usize; 2],
    ) -> Option<PlanAddresses> {
        let [key_dim, dim] = dims;
        let mut take = |bytes: usize| self.device.take_scratch(bytes as u64);
        let rows = tables.ends.len();
        // Parts that grow with the stored tokens come last, so little moves when they grow, and
        // graphs stay unchanged.
        Some(PlanAddresses {
            // One piece, so that it comes back by one copy.
            sums: take(rows * (2 * dim + 3) * 4)?,
            first_bad: take(tables.turns.len() * 4)?,
            out: take(tables.partials * dim * 4)?,
            stats: take(tables.partials * 8)?,
            // A kernel writes them where the host does not bring them, with all that is behind.
            queries: take(tables.query_rows * key_dim * 4)?,
            offsets: take(tables.query_rows * 4)?,
            ends: take(size_of_val(&tables.ends[..]))?,
            turns: take(size_of_val(&tables.turns[..]))?,
            partials: take(size_of_val(&tables.order[..]))?,
            units: {
                let units = tables.launches.iter().map(|launch| size_of_val(&launch.units[..]));
                units.map(&mut take).collect::<Option<_>>()?
            },
            pages: take(size_of_val(&tables.pages[..]))?,
        })
    }

    fn run_attention(
        &mut self,
        plan: &AttendPlan,
        tables: &AttendTables,
        placed: &PlanAddresses,
        dim: usize,
    ) -> Result<Attended, BackendError> {
        upload_tables(&mut self.device, tables, placed)?;
        let nodes = self.attention_nodes(plan, tables, placed, dim);
        self.graphs.run_nodes(&mut self.device, (plan.model, plan.layer), nodes)?;
        let rows = tables.ends.len();
        let mut sums = vec![0f32; rows * (2 * dim + 3)];
        self.device.download_scratch(placed.sums, bytemuck::cast_slice_mut(&mut sums))?;
        let results = sums.split_off(rows * 2 * dim);
        let merged = MergedResults { sums, results };
        Ok(merged.to_attended(plan, self.model_codec(plan.model)?))
    }

    /// Attention and the merge, stages 1 and 2.
    pub(super) fn attention_nodes(
        &mut self,
        plan: &AttendPlan,
        tables: &AttendTables,
        placed: &PlanAddresses,
        dim: usize,
    ) -> Vec<LaunchNode> {
        if let Some(jit) = &mut self.jit {
            jit.load_compiled(|image, kernels| self.device.load_late(image, kernels));
        }
        let layer_tables = self.models[&plan.model].layers[&plan.layer].tables;
        let arena = self.device.arena();
        let mut nodes = Vec::with_capacity(tables.launches.len() + 3);
        for (launch, units) in tables.launches.iter().zip(&placed.units) {
            let parameters = AttendParameters {
                arena,
                tables: layer_tables,
                pages: placed.pages,
                units: *units,
                queries: placed.queries,
                offsets: placed.offsets,
                out: placed.out,
                stats: placed.stats,
                key_stage: launch.key_stage,
                value_stage: launch.value_stage,
                key_table: launch.key_table,
                value_table: launch.value_table,
                soft_cap: tables.soft_cap,
                chunks: launch.chunks,
                key_chunk: launch.key_chunk,
                value_chunk: launch.value_chunk,
                buffers: launch.buffers,
                unused: 0,
            };
            let own = self.jit.as_ref().and_then(|jit| {
                let unit = launch.units.first()?;
                let rows = launch.units.iter().map(|unit| unit.rows).max()?;
                jit.own_kernel(&launch.kernel, [unit.key.kind, unit.value.kind], rows)
            });
            nodes.push(LaunchNode {
                stage: 1,
                kernel: own.unwrap_or_else(|| launch.kernel.clone()),
                blocks: launch.units.len() as u32,
                threads: ATTEND_THREADS,
                shared_bytes: launch.shared_bytes as u32,
                parameters: bytemuck::bytes_of(&parameters).to_vec(),
            });
        }
        let rows = tables.ends.len();
        let parameters = MergeParameters {
            out: placed.out,
            stats: placed.stats,
            ends: placed.ends,
            partials: placed.partials,
            sums: placed.sums,
            results: placed.results_address(rows, dim),
            dim: dim as u32,
            unused: 0,
        };
        nodes.push(LaunchNode {
            stage: 2,
            kernel: "kvd_merge".to_owned(),
            blocks: rows as u32,
            threads: MERGE_THREADS,
            shared_bytes: merge_shared_bytes(dim) as u32,
            parameters: bytemuck::bytes_of(&parameters).to_vec(),
        });
        nodes
    }
}

/// Brings the tables to where they have a place.
pub(super) fn upload_tables(
    device: &mut DeviceMemory,
    tables: &AttendTables,
    placed: &PlanAddresses,
) -> Result<(), BackendError> {
    // Neighbours in scratch memory, so that this is one copy.
    device.upload_scratch(placed.queries, bytemuck::cast_slice(&tables.queries))?;
    device.upload_scratch(placed.offsets, bytemuck::cast_slice(&tables.offsets))?;
    device.upload_scratch(placed.ends, bytemuck::cast_slice(&tables.ends))?;
    device.upload_scratch(placed.turns, bytemuck::cast_slice(&tables.turns))?;
    device.upload_scratch(placed.partials, bytemuck::cast_slice(&tables.order))?;
    for (launch, units) in tables.launches.iter().zip(&placed.units) {
        device.upload_scratch(*units, bytemuck::cast_slice(&launch.units))?;
    }
    device.upload_scratch(placed.pages, bytemuck::cast_slice(&tables.pages))
}
