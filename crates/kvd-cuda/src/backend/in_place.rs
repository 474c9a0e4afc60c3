//! Attention on queries in a worker's memory, answered there: what comes to the host is one word
//! per unit, whether its queries were numbers.

use super::attend::{PlanAddresses, upload_tables};
use super::graphs::LaunchNode;
use super::region::RegionValues;
use super::{CudaBackend, device_error};
use crate::abi::{ALL_FINITE, AnswerParameters, QueryParameters, REGION_THREADS, TransformUnit};
use crate::store::dtype_number;
use crate::{AttendTables, QueryTransforms};
use kvd_compute::{AttendPlan, BackendError, RegionPlaces};
use kvd_core::{DType, ErrorCode};

/// Where queries are and answers go, as addresses.
#[derive(Clone, Copy)]
struct AttendBuffers {
    q: u64,
    out: u64,
    lse: u64,
}

impl CudaBackend {
    /// Answers a plan in a region, in halves when the scratch memory is too small for it at once.
    pub(super) fn attend_at(
        &mut self,
        plan: &AttendPlan,
        places: &RegionPlaces,
        launched: &mut dyn FnMut(),
    ) -> Result<u64, BackendError> {
        let [key_dim, dim] = self.row_dims(plan)?;
        let (rows, each) = (plan.rows(), plan.dtype.size_bytes());
        // A kernel says by a word which of the values is none.
        if rows * key_dim as u64 >= u64::from(ALL_FINITE) {
            let message = format!("{rows} query rows; ask for fewer query tokens at once");
            return Err(device_error(ErrorCode::LimitExceeded, message));
        }
        let RegionPlaces { region, q, out, lse } = *places;
        let find = |offset, count, bytes_each| {
            self.regions.find_values(region, offset, RegionValues { count, bytes_each })
        };
        let reach = AttendBuffers {
            q: find(q, rows * key_dim as u64, each)?,
            out: find(out, rows * dim as u64, each)?,
            lse: find(lse, rows, DType::F32.size_bytes())?,
        };
        let event = self.regions.answer_event(region);
        self.attend_reaching(plan, reach, &mut |backend| {
            // Without an event there is nothing to wait for but the end of the call.
            let Some(event) = event else { return Ok(()) };
            backend.device.record_event(event)?;
            launched();
            Ok(())
        })
    }

    /// Answers a plan whose buffers are given by address; `launched` is called behind the last
    /// launch.
    fn attend_reaching(
        &mut self,
        plan: &AttendPlan,
        reach: AttendBuffers,
        launched: &mut dyn FnMut(&mut Self) -> Result<(), BackendError>,
    ) -> Result<u64, BackendError> {
        let tables = self.build_tables(plan, true)?;
        let dims = self.row_dims(plan)?;
        self.clear_scratch();
        if let Some(placed) = self.allocate_tables(&tables, dims) {
            return self.run_at(plan, tables, &placed, reach, launched);
        }
        let (first, second) = self.halve_plan(plan)?;
        let (rows, each) = (first.rows(), plan.dtype.size_bytes() as u64);
        let values = dims.map(|dim| rows * dim as u64);
        let rest = AttendBuffers {
            q: reach.q + values[0] * each,
            out: reach.out + values[1] * each,
            lse: reach.lse + rows * DType::F32.size_bytes() as u64,
        };
        let read = self.attend_reaching(&first, reach, &mut |_| Ok(()))?;
        let of_rest = self.attend_reaching(&second, rest, launched);
        let of_rest = of_rest.map_err(|error| match error {
            BackendError::NonFiniteQuery { index, value } => {
                BackendError::NonFiniteQuery { index: index + values[0] as usize, value }
            }
            BackendError::QueryOverflow { query, token, head, scale } => {
                let query = query + first.queries.len();
                BackendError::QueryOverflow { query, token, head, scale }
            }
            other => other,
        });
        Ok(read + of_rest?)
    }

    /// Tells units where their transforms are, which are brought to the device with the first of
    /// them; gives the address that offsets count from.
    fn bring_turns(
        &mut self,
        plan: &AttendPlan,
        units: &mut [TransformUnit],
    ) -> Result<u64, BackendError> {
        let codec = self.model_codec(plan.model)?;
        let group = plan.q_heads / codec.geometry().kv_heads;
        let known = self.models[&plan.model].layers[&plan.layer].turns.as_ref();
        if let Some((turns, address)) = known {
            turns.set_steps(units, group);
            return Ok(*address);
        }
        let turns = QueryTransforms::new(codec, plan.layer);
        turns.set_steps(units, group);
        let place = self.layer_ranges(plan.model, plan.layer)?.turns;
        let address = self.device.write_table(place, &turns.steps)?;
        let of_model = self.models.entry(plan.model).or_default();
        if let Some(layer) = of_model.layers.get_mut(&plan.layer) {
            layer.turns = Some((turns, address));
        }
        Ok(address)
    }

    fn run_at(
        &mut self,
        plan: &AttendPlan,
        mut tables: AttendTables,
        placed: &PlanAddresses,
        reach: AttendBuffers,
        launched: &mut dyn FnMut(&mut Self) -> Result<(), BackendError>,
    ) -> Result<u64, BackendError> {
        let geometry = self.model_codec(plan.model)?.geometry();
        let token_bytes = geometry.token_bytes();
        let group = plan.q_heads / geometry.kv_heads;
        let [key_dim, dim] = self.row_dims(plan)?;
        let steps = self.bring_turns(plan, &mut tables.turns)?;
        let (dtype, heads, units) = (dtype_number(plan.dtype), plan.q_heads, placed.turns);
        upload_tables(&mut self.device, &tables, placed)?;
        let queries = QueryParameters {
            queries: reach.q,
            units,
            steps,
            rows: placed.queries,
            offsets: placed.offsets,
            first_bad: placed.first_bad,
            scale: plan.score_scale(key_dim),
            dim: key_dim as u32,
            dtype,
            heads,
            group,
            unused: 0,
        };
        let count = tables.turns.len();
        let of_queries = TransformKernel { name: "kvd_queries", dim: key_dim };
        let queries = transform_node(0, of_queries, count, bytemuck::bytes_of(&queries));
        let mut nodes = vec![queries];
        nodes.extend(self.attention_nodes(plan, &tables, placed, dim));
        let answer = AnswerParameters {
            sums: placed.sums,
            results: placed.results_address(tables.ends.len(), dim),
            units,
            steps,
            out: reach.out,
            lse: reach.lse,
            dim: dim as u32,
            dtype,
            heads,
            group,
        };
        let of_answer = TransformKernel { name: "kvd_answer", dim };
        nodes.push(transform_node(3, of_answer, count, bytemuck::bytes_of(&answer)));
        self.graphs.run_nodes(&mut self.device, (plan.model, plan.layer), nodes)?;
        launched(self)?;
        let mut first_bad = vec![0u32; count];
        self.device.download_scratch(placed.first_bad, bytemuck::cast_slice_mut(&mut first_bad))?;
        let bad = first_bad.into_iter().min().filter(|index| *index != ALL_FINITE);
        if let Some(index) = bad {
            return Err(self.bad_query(plan, reach.q, index)?);
        }
        let parts = plan.queries.iter().flat_map(|query| query.parts.iter());
        Ok(parts.map(|part| part.stored_bytes(token_bytes)).sum())
    }

    /// The error for a query value in a worker's memory that is not finite, or becomes so by the
    /// scale.
    fn bad_query(
        &mut self,
        plan: &AttendPlan,
        queries: u64,
        index: u32,
    ) -> Result<BackendError, BackendError> {
        let ([dim, _], dtype) = (self.row_dims(plan)?, plan.dtype);
        let mut bytes = [0; 4];
        let bytes = &mut bytes[..dtype.size_bytes()];
        self.device.download_scratch(queries + u64::from(index) * bytes.len() as u64, bytes)?;
        let mut value = [0f32];
        dtype.widen_values(bytes, &mut value);
        let (index, [value]) = (index as usize, value);
        if value.is_finite() && !(value * plan.score_scale(dim)).is_finite() {
            return Ok(BackendError::query_overflow(plan, index / dim, dim));
        }
        Ok(BackendError::NonFiniteQuery { index, value })
    }
}

/// A kernel over rows of so many channels.
#[derive(Clone, Copy)]
struct TransformKernel<'a> {
    name: &'a str,
    dim: usize,
}

/// A kernel over units of rows.
fn transform_node(
    stage: u32,
    kernel: TransformKernel<'_>,
    count: usize,
    parameters: &[u8],
) -> LaunchNode {
    let TransformKernel { name, dim } = kernel;
    LaunchNode {
        stage,
        kernel: name.to_owned(),
        blocks: count as u32,
        threads: REGION_THREADS,
        shared_bytes: QueryTransforms::shared_bytes(dim) as u32,
        parameters: parameters.to_vec(),
    }
}
