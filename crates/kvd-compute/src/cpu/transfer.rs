//! Blocks that leave the CPU's page memory and come back.

use super::CpuBackend;
use crate::{BackendError, TransferBackend};
use kvd_codec::{LayerPages, ModelCodec};
use kvd_core::{Extent, ModelId};

impl TransferBackend for CpuBackend {
    fn read_slot(&mut self, from: Extent, bytes: &mut [u8]) -> Result<(), BackendError> {
        bytes.copy_from_slice(self.arena.extent_bytes(from));
        Ok(())
    }

    fn write_rows_slot(&mut self, bytes: &[u8], to: Extent) -> Result<(), BackendError> {
        self.fill(to, bytes);
        Ok(())
    }

    fn write_pages_slot(&mut self, pages: LayerPages<'_>, to: Extent) -> Result<(), BackendError> {
        self.fill(to, pages.bytes);
        Ok(())
    }

    fn page_codec(&mut self, model: ModelId) -> Result<&mut ModelCodec, BackendError> {
        let state = self.models.get_mut(&model).ok_or(BackendError::UnknownModel(model))?;
        Ok(&mut state.codec)
    }
}
