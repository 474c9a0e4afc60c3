//! K and V of many layers at once, to and from where an engine keeps them.

use super::call_error::CallError;
use super::payload;
use crate::{RequestError, v1};
use bytes::Bytes;
use kvd_core::{DType, LayerIndex, ModelId, SequenceId};

/// Where the rows of one side are; of strides 0 stands for dense rows. [`v1::Rows`] says how.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RowLayout {
    /// Byte of the first row of block 0.
    pub offset: u64,
    /// Bytes from one head to the next.
    pub head_stride: u64,
    /// Bytes from one token to the next, within a block where there are any.
    pub token_stride: u64,
    /// Bytes from one layer to the next.
    pub layer_stride: u64,
    /// Blocks of an engine's cache that the rows are in.
    pub table: Option<RowTable>,
}

/// Blocks that the rows of consecutive tokens are in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RowTable {
    /// Tokens of a block, at least 1.
    pub block_tokens: u32,
    /// Bytes from one block to the next; 0 stands for dense ones.
    pub block_stride: u64,
    /// Numbers of the blocks, in the order of tokens.
    pub blocks: Vec<u32>,
    /// Row of the first block where the first token is.
    pub first_row: u32,
}

impl RowLayout {
    /// Dense rows from a byte on.
    #[must_use]
    pub fn from_offset(offset: u64) -> Self {
        Self { offset, ..Self::default() }
    }
}

impl TryFrom<v1::Rows> for RowLayout {
    type Error = RequestError;

    fn try_from(rows: v1::Rows) -> Result<Self, RequestError> {
        let v1::Rows { offset, head_stride, token_stride, layer_stride, .. } = rows;
        let v1::Rows { block_tokens, block_stride, blocks, first_row, .. } = rows;
        let has_table = block_stride != 0 || first_row != 0 || !blocks.is_empty();
        let table = match block_tokens {
            0 if has_table => return Err(RequestError::Missing { field: "block_tokens" }),
            0 => None,
            _ => Some(RowTable { block_tokens, block_stride, blocks, first_row }),
        };
        Ok(Self { offset, head_stride, token_stride, layer_stride, table })
    }
}

impl From<RowLayout> for v1::Rows {
    fn from(layout: RowLayout) -> Self {
        let RowLayout { offset, head_stride, token_stride, layer_stride, table } = layout;
        let rows = Self { offset, head_stride, token_stride, layer_stride, ..Self::default() };
        match table {
            None => rows,
            Some(RowTable { block_tokens, block_stride, blocks, first_row }) => {
                Self { block_tokens, block_stride, blocks, first_row, ..rows }
            }
        }
    }
}

/// Tokens of consecutive layers of one sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepPart {
    /// The sequence.
    pub sequence: SequenceId,
    /// First token, on all of the layers.
    pub start: u32,
    /// Tokens, at least 1; `start + tokens` fits a `u32`.
    pub tokens: u32,
    /// The first layer.
    pub first_layer: LayerIndex,
    /// How many layers; `None` is all from the first on.
    pub layers: Option<u32>,
    /// Where keys are.
    pub k: RowLayout,
    /// Where values are.
    pub v: RowLayout,
}

impl StepPart {
    /// Most parts of one step.
    pub const PARTS_MAX: usize = 4096;

    /// One past the last token.
    #[must_use]
    pub fn end_token(&self) -> u32 {
        self.start.saturating_add(self.tokens)
    }
}

impl TryFrom<v1::StepPart> for StepPart {
    type Error = RequestError;

    fn try_from(part: v1::StepPart) -> Result<Self, RequestError> {
        if part.tokens == 0 {
            return Err(RequestError::invalid_field("tokens", "must be at least 1"));
        }
        if part.start.checked_add(part.tokens).is_none() {
            return Err(RequestError::invalid_field("tokens", "start + tokens is past 2^32 - 1"));
        }
        let rows = |field, rows: Option<v1::Rows>| {
            rows.ok_or(RequestError::Missing { field }).and_then(RowLayout::try_from)
        };
        Ok(Self {
            sequence: SequenceId(part.sequence_id),
            start: part.start,
            tokens: part.tokens,
            first_layer: LayerIndex(part.first_layer),
            layers: Some(part.layers).filter(|layers| *layers != 0),
            k: rows("k", part.k)?,
            v: rows("v", part.v)?,
        })
    }
}

impl From<StepPart> for v1::StepPart {
    fn from(part: StepPart) -> Self {
        Self {
            sequence_id: part.sequence.0,
            start: part.start,
            tokens: part.tokens,
            first_layer: part.first_layer.0,
            layers: part.layers.unwrap_or(0),
            k: Some(part.k.into()),
            v: Some(part.v.into()),
        }
    }
}

fn parts_from_wire(parts: Vec<v1::StepPart>) -> Result<Vec<StepPart>, RequestError> {
    if parts.is_empty() {
        return Err(RequestError::Missing { field: "parts" });
    }
    let (given, max) = (parts.len() as u64, StepPart::PARTS_MAX as u64);
    if given > max {
        return Err(RequestError::OverLimit { field: "parts", given, max });
    }
    let part = |(index, part): (usize, v1::StepPart)| {
        StepPart::try_from(part).map_err(|error| error.in_part(index))
    };
    parts.into_iter().enumerate().map(part).collect()
}

/// A store of many layers: all of it or nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreStep {
    /// The model of all parts.
    pub model: ModelId,
    /// 1 to [`StepPart::PARTS_MAX`].
    pub parts: Vec<StepPart>,
    /// Memory that rows are in; empty where that is a region.
    pub memory: Bytes,
}

impl TryFrom<v1::StoreStepRequest> for StoreStep {
    type Error = RequestError;

    fn try_from(request: v1::StoreStepRequest) -> Result<Self, RequestError> {
        let v1::StoreStepRequest { model_id, parts, memory } = request;
        Ok(Self { model: ModelId(model_id), parts: parts_from_wire(parts)?, memory })
    }
}

impl From<StoreStep> for v1::StoreStepRequest {
    fn from(step: StoreStep) -> Self {
        let parts = step.parts.into_iter().map(v1::StepPart::from).collect();
        Self { model_id: step.model.0, parts, memory: step.memory }
    }
}

/// The answer to one part of a [`StoreStep`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredPart {
    /// Tokens that all of the part's layers have now.
    pub length: u32,
    /// All of it had been stored before.
    pub replayed: bool,
    /// Blocks encoded on the way, over all of the part's layers.
    pub packed_blocks: u32,
}

impl From<v1::StoredPart> for StoredPart {
    fn from(part: v1::StoredPart) -> Self {
        let v1::StoredPart { length, replayed, packed_blocks } = part;
        Self { length, replayed, packed_blocks }
    }
}

impl From<StoredPart> for v1::StoredPart {
    fn from(part: StoredPart) -> Self {
        let StoredPart { length, replayed, packed_blocks } = part;
        Self { length, replayed, packed_blocks }
    }
}

/// A load of many layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadStep {
    /// The model of all parts.
    pub model: ModelId,
    /// 1 to [`StepPart::PARTS_MAX`], whose rows do not meet.
    pub parts: Vec<StepPart>,
    /// Precision of the rows; `None` is the model's.
    pub dtype: Option<DType>,
    /// Bytes of the memory that the answer carries; 0 where rows go to a region.
    pub memory_bytes: u64,
}

impl TryFrom<v1::LoadStepRequest> for LoadStep {
    type Error = RequestError;

    fn try_from(request: v1::LoadStepRequest) -> Result<Self, RequestError> {
        Ok(Self {
            model: ModelId(request.model_id),
            dtype: payload::optional_dtype(request.dtype, "dtype")?,
            parts: parts_from_wire(request.parts)?,
            memory_bytes: request.memory_bytes,
        })
    }
}

impl From<LoadStep> for v1::LoadStepRequest {
    fn from(step: LoadStep) -> Self {
        Self {
            model_id: step.model.0,
            parts: step.parts.into_iter().map(v1::StepPart::from).collect(),
            dtype: step.dtype.map_or(0, payload::dtype_to_wire),
            memory_bytes: step.memory_bytes,
        }
    }
}

/// A part of a [`LoadStep`] whose rows are not there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartError {
    /// Position in [`LoadStep::parts`].
    pub part: u32,
    /// Why not.
    pub error: CallError,
}

impl From<v1::PartError> for PartError {
    fn from(error: v1::PartError) -> Self {
        Self { part: error.part, error: error.error.unwrap_or_default().into() }
    }
}

impl From<PartError> for v1::PartError {
    fn from(error: PartError) -> Self {
        Self { part: error.part, error: Some(error.error.into()) }
    }
}

/// The answer to a [`LoadStep`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadedStep {
    /// Parts whose rows are not there, in order.
    pub errors: Vec<PartError>,
    /// Memory that the rows are in; empty where that is a region.
    pub memory: Bytes,
}

impl From<v1::LoadStepResponse> for LoadedStep {
    fn from(response: v1::LoadStepResponse) -> Self {
        let errors = response.errors.into_iter().map(PartError::from).collect();
        Self { errors, memory: response.memory }
    }
}

impl From<LoadedStep> for v1::LoadStepResponse {
    fn from(step: LoadedStep) -> Self {
        let errors = step.errors.into_iter().map(v1::PartError::from).collect();
        Self { errors, memory: step.memory }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part() -> StepPart {
        let table =
            RowTable { block_tokens: 16, block_stride: 0, blocks: vec![7, 2], first_row: 3 };
        StepPart {
            sequence: SequenceId(3),
            start: 10,
            tokens: 20,
            first_layer: LayerIndex(1),
            layers: Some(2),
            k: RowLayout { layer_stride: 4096, table: Some(table), ..RowLayout::default() },
            v: RowLayout::from_offset(64),
        }
    }

    #[test]
    fn steps_round_trip() {
        let (model, parts) = (ModelId(5), vec![part(), StepPart { layers: None, ..part() }]);
        let store = StoreStep { model, parts: parts.clone(), memory: vec![1, 2].into() };
        assert_eq!(StoreStep::try_from(v1::StoreStepRequest::from(store.clone())), Ok(store));
        let load = LoadStep { model, parts, dtype: Some(DType::BF16), memory_bytes: 9 };
        assert_eq!(LoadStep::try_from(v1::LoadStepRequest::from(load.clone())), Ok(load));
    }

    #[test]
    fn refusals_name_the_part_and_the_field() {
        let refusal = |change: fn(&mut v1::StepPart)| {
            let mut bad = v1::StepPart::from(part());
            change(&mut bad);
            let parts = vec![part().into(), bad];
            let request = v1::StoreStepRequest { model_id: 1, parts, ..Default::default() };
            StoreStep::try_from(request).unwrap_err().to_string()
        };
        assert_eq!(refusal(|part| part.tokens = 0), "parts[1].tokens: must be at least 1");
        assert!(refusal(|part| part.start = u32::MAX).contains("past 2^32 - 1"));
        assert_eq!(refusal(|part| part.v = None), "parts[1].v is missing");
        let without = |part: &mut v1::StepPart| part.k.as_mut().unwrap().block_tokens = 0;
        assert_eq!(refusal(without), "parts[1].block_tokens is missing");
        let empty = StoreStep::try_from(v1::StoreStepRequest::default()).unwrap_err();
        assert_eq!(empty.to_string(), "parts is missing");
        let parts = vec![v1::StepPart::from(part()); StepPart::PARTS_MAX + 1];
        let many = v1::LoadStepRequest { parts, ..Default::default() };
        let error = LoadStep::try_from(many).unwrap_err();
        assert_eq!(error.to_string(), "parts is 4097; the maximum is 4096");
    }
}
