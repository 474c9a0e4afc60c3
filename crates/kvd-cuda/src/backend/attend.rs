//! Attention on the device: tables up, launches, merge, results down.

use super::{CudaBackend, THREADS, error};
use crate::abi::{AttendParameters, MergeParameters};
use crate::driver::KernelLaunch;
use crate::plan::splits;
use crate::{Merged, Options, Tables};
use kvd_compute::{AttendPlan, Attended, BackendError};
use kvd_core::{ErrorCode, Side};

/// Where the tables of a plan lie on the device.
struct Placed {
    pages: u64,
    queries: u64,
    offsets: u64,
    ends: u64,
    partials: u64,
    units: Vec<u64>,
    out: u64,
    stats: u64,
    /// And results behind them.
    sums: u64,
}

impl CudaBackend {
    /// Answers a plan, in halves when the scratch memory is too small for it at once.
    pub(super) fn attend_all(&mut self, plan: &AttendPlan) -> Result<Attended, BackendError> {
        let tables = self.tables(plan)?;
        let dim = self.codec(plan.model)?.geometry().head_dim(Side::Value);
        self.clear_scratch();
        if let Some(placed) = self.place_tables(&tables, dim) {
            return self.run(plan, &tables, &placed, dim);
        }
        if plan.queries.len() < 2 {
            let message = "one query's block table and partial results are over the scratch memory \
                           of the GPU; ask for fewer query tokens at once";
            return Err(error(ErrorCode::LimitExceeded, message));
        }
        let (first, second) = self.halves(plan)?;
        let mut answer = self.attend_all(&first)?;
        let rest = self.attend_all(&second)?;
        answer.out.extend(rest.out);
        answer.lse.extend(rest.lse);
        answer.stored_bytes_read += rest.stored_bytes_read;
        Ok(answer)
    }

    fn halves(&self, plan: &AttendPlan) -> Result<(AttendPlan, AttendPlan), BackendError> {
        let dim = self.codec(plan.model)?.geometry().head_dim(Side::Key);
        let row_bytes = plan.q_heads as usize * dim * plan.dtype.size_bytes();
        let (first, second) = plan.queries.split_at(plan.queries.len() / 2);
        let rows: usize = first.iter().map(|query| query.n_q as usize).sum();
        let half = |queries: &[_], q| AttendPlan { queries: queries.to_vec(), q, ..plan.clone() };
        let cut = rows * row_bytes;
        Ok((half(first, plan.q.slice(..cut)), half(second, plan.q.slice(cut..))))
    }

    /// The plan's tables.
    fn tables(&mut self, plan: &AttendPlan) -> Result<Tables, BackendError> {
        self.bring_layer(plan.model, plan.layer)?;
        let codec = self.codec(plan.model)?;
        let limits = self.device.limits();
        let heads = plan.queries.len() as u32 * codec.geometry().kv_heads;
        let parts = plan.queries.iter().map(|query| query.parts.len()).max().unwrap_or(0) as u32;
        let parts_per_unit = splits(limits.multiprocessors * 4, heads, parts).1 as usize;
        let header = |offset: u64| self.headers.get(&offset).copied();
        let shapes = &self.models[&plan.model].layers[&plan.layer].shapes;
        let options = Options { parts_per_unit, shared: limits.shared() };
        Ok(Tables::new(plan, codec, shapes, &header, options)?)
    }

    /// Finds scratch memory for everything; `None` when it is too little.
    fn place_tables(&mut self, tables: &Tables, dim: usize) -> Option<Placed> {
        let mut take = |bytes: usize| self.device.scratch(bytes as u64);
        let rows = tables.ends.len();
        Some(Placed {
            pages: take(size_of_val(&tables.pages[..]))?,
            queries: take(size_of_val(&tables.queries[..]))?,
            offsets: take(size_of_val(&tables.offsets[..]))?,
            ends: take(size_of_val(&tables.ends[..]))?,
            partials: take(size_of_val(&tables.order[..]))?,
            units: {
                let units = tables.launches.iter().map(|launch| size_of_val(&launch.units[..]));
                units.map(&mut take).collect::<Option<_>>()?
            },
            out: take(tables.partials * dim * 4)?,
            stats: take(tables.partials * 8)?,
            // One piece, so that it comes back by one copy.
            sums: take(rows * (2 * dim + 3) * 4)?,
        })
    }

    fn run(
        &mut self,
        plan: &AttendPlan,
        tables: &Tables,
        placed: &Placed,
        dim: usize,
    ) -> Result<Attended, BackendError> {
        let layer_tables = self.models[&plan.model].layers[&plan.layer].tables;
        let device = &mut self.device;
        // Neighbours in scratch memory, so that this is one copy.
        device.upload(placed.pages, bytemuck::cast_slice(&tables.pages))?;
        device.upload(placed.queries, bytemuck::cast_slice(&tables.queries))?;
        device.upload(placed.offsets, bytemuck::cast_slice(&tables.offsets))?;
        device.upload(placed.ends, bytemuck::cast_slice(&tables.ends))?;
        device.upload(placed.partials, bytemuck::cast_slice(&tables.order))?;
        for (launch, units) in tables.launches.iter().zip(&placed.units) {
            device.upload(*units, bytemuck::cast_slice(&launch.units))?;
        }
        for (launch, units) in tables.launches.iter().zip(&placed.units) {
            let parameters = AttendParameters {
                arena: device.arena(),
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
            };
            device.launch(KernelLaunch {
                kernel: &launch.kernel,
                blocks: launch.units.len() as u32,
                threads: THREADS,
                shared_bytes: launch.shared_bytes as u32,
                parameters: bytemuck::bytes_of(&parameters),
            })?;
        }
        let rows = tables.ends.len();
        let parameters = MergeParameters {
            out: placed.out,
            stats: placed.stats,
            ends: placed.ends,
            partials: placed.partials,
            sums: placed.sums,
            results: placed.sums + (rows * 2 * dim * 4) as u64,
            dim: dim as u32,
            unused: 0,
        };
        device.launch(KernelLaunch {
            kernel: "kvd_merge",
            blocks: rows as u32,
            threads: THREADS,
            shared_bytes: 0,
            parameters: bytemuck::bytes_of(&parameters),
        })?;
        let mut sums = vec![0f32; rows * (2 * dim + 3)];
        device.download(placed.sums, bytemuck::cast_slice_mut(&mut sums))?;
        let results = sums.split_off(rows * 2 * dim);
        let merged = Merged { sums, results };
        Ok(merged.finish(plan, self.codec(plan.model)?))
    }
}
