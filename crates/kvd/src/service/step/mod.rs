//! Steps: K and V of many layers in one call, to and from where an engine keeps them. This owns
//! what stores and loads have in common: memory, limits, and the places of rows.

mod load;
mod places;
mod store;

pub(crate) use load::{LoadStepJob, LoadedStep, RefusedPart};
pub(crate) use store::StoreStepJob;

use super::{CallContext, RegisteredModel, Service, ServiceError};
use bytes::Bytes;
use kvd_core::{DType, ErrorCode, Geometry, ModelId, Side};
use kvd_proto::RequestError;
use kvd_proto::domain::{RowLayout, StepPart};
use kvd_shm::RegionMemory;
use places::{RowPlaces, RowShape};
use std::sync::Arc;

/// Rows of a step that are read or written by the engine's side.
pub(crate) enum StepMemory {
    /// A region's memory file.
    Region(Arc<RegionMemory>),
    /// Bytes that a message carries.
    Message(Bytes),
    /// Bytes that an answer will carry.
    Answer(Vec<u8>),
}

impl StepMemory {
    fn size_bytes(&self) -> u64 {
        match self {
            Self::Region(memory) => memory.size_bytes(),
            Self::Message(bytes) => bytes.len() as u64,
            Self::Answer(bytes) => bytes.len() as u64,
        }
    }

    /// Copies out the rows of a layer, as `[tokens, heads, dim]`.
    fn gather_rows(
        &self,
        places: &RowPlaces,
        layer: u32,
        to: &mut [u8],
    ) -> Result<(), ServiceError> {
        places.visit_runs(layer, |run| {
            let to = &mut to[run.dense..run.dense + run.bytes];
            match self {
                Self::Region(memory) => return Ok(memory.read_bytes(run.at, to)?),
                Self::Message(bytes) => to.copy_from_slice(&bytes[run.at as usize..][..run.bytes]),
                Self::Answer(bytes) => to.copy_from_slice(&bytes[run.at as usize..][..run.bytes]),
            }
            Ok(())
        })
    }

    /// Copies the rows of a layer, `[tokens, heads, dim]`, to their places.
    fn scatter_rows(
        &mut self,
        places: &RowPlaces,
        layer: u32,
        from: &[u8],
    ) -> Result<(), ServiceError> {
        places.visit_runs(layer, |run| {
            let from = &from[run.dense..run.dense + run.bytes];
            match self {
                Self::Region(memory) => return Ok(memory.write_bytes(run.at, from)?),
                Self::Answer(bytes) => {
                    bytes[run.at as usize..][..run.bytes].copy_from_slice(from);
                }
                Self::Message(_) => {
                    let message = "rows are to be written to a message that came";
                    return Err(ServiceError::new(ErrorCode::Internal, message));
                }
            }
            Ok(())
        })
    }
}

/// Rows that a layer of a part counts for at least, on each side.
const LAYER_ROWS_MIN: u64 = 64;

/// A part of a step whose rows all are inside the memory.
struct PlacedPart {
    part: StepPart,
    layers: u32,
    k: RowPlaces,
    v: RowPlaces,
}

impl PlacedPart {
    /// Bytes of one layer, K and V.
    fn layer_bytes(&self) -> u64 {
        self.k.row_shape().layer_bytes() + self.v.row_shape().layer_bytes()
    }
}

/// A step's parts by the geometry of their model.
struct PartsPlan<'a> {
    geometry: &'a Geometry,
    /// Type of values in the engine's memory.
    dtype: DType,
    memory_bytes: u64,
    rows_max: u64,
}

impl PartsPlan<'_> {
    /// Tests every part's layers and places, and how many rows they have together.
    fn place_parts(&self, parts: Vec<StepPart>) -> Result<Vec<PlacedPart>, ServiceError> {
        let mut rows = 0u64;
        let mut placed = Vec::with_capacity(parts.len());
        for (index, part) in parts.into_iter().enumerate() {
            let part = self.place_part(part).map_err(|error| error.in_part(index))?;
            // Each layer of a part has book-keeping, however few its rows are.
            let least = u64::from(part.layers) * LAYER_ROWS_MIN;
            for places in [&part.k, &part.v] {
                rows = rows.saturating_add(places.row_shape().count_rows().max(least));
            }
            // Before anything that takes time by rows.
            if rows > self.rows_max {
                let max = self.rows_max;
                let message = format!(
                    "the step has over limits.step_rows_max = {max} rows of heads, tokens and \
                     layers; send fewer tokens or layers at once"
                );
                return Err(ServiceError::new(ErrorCode::LimitExceeded, message));
            }
            placed.push(part);
        }
        Ok(placed)
    }

    fn place_part(&self, part: StepPart) -> Result<PlacedPart, RequestError> {
        let (of_model, first) = (self.geometry.layers, part.first_layer.0);
        let refuse = |reason: String| RequestError::Invalid { field: "layers", reason };
        let left = of_model.checked_sub(first).filter(|left| *left > 0);
        let left = left.ok_or_else(|| {
            refuse(format!("first_layer {first} of a model with {of_model} layers"))
        })?;
        let layers = part.layers.unwrap_or(left);
        if layers > left {
            let reason = format!("{layers} from layer {first} of a model with {of_model} layers");
            return Err(refuse(reason));
        }
        let place = |field, side, layout: &RowLayout| {
            let shape = RowShape {
                layers,
                tokens: part.tokens,
                heads: self.geometry.kv_heads,
                row_bytes: (self.geometry.head_dim(side) * self.dtype.size_bytes()) as u64,
            };
            RowPlaces::resolve_layout(field, layout, shape, self.memory_bytes)
        };
        let k = place("k", Side::Key, &part.k)?;
        let v = place("v", Side::Value, &part.v)?;
        Ok(PlacedPart { part, layers, k, v })
    }
}

impl Service {
    /// The model of a step, as the caller may use it.
    fn step_model(
        &self,
        call: &CallContext,
        model: ModelId,
    ) -> Result<Arc<RegisteredModel>, ServiceError> {
        self.admit_call(call)?;
        self.models.find_model(&call.namespace, model)
    }

    /// Refuses a sequence that is not of the step's model.
    fn check_part_model(
        &self,
        call: &CallContext,
        part: &StepPart,
        model: &RegisteredModel,
    ) -> Result<(), ServiceError> {
        let of = self.shard_of(part.sequence)?.store.model_of(&call.namespace, part.sequence)?;
        if of.id == model.shape.id {
            return Ok(());
        }
        let (sequence, of, wanted) = (part.sequence, of.id, model.shape.id);
        let message = format!("sequence {sequence} is of model {of}, not {wanted}");
        Err(ServiceError::new(ErrorCode::InvalidArgument, message))
    }
}
