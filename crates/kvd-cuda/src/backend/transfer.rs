//! Blocks that leave a GPU's page memory and come back, through the pinned memory that copies go
//! through.

use super::CudaBackend;
use kvd_codec::{LayerPages, ModelCodec};
use kvd_compute::{BackendError, TransferBackend};
use kvd_core::{Extent, ModelId};

impl TransferBackend for CudaBackend {
    fn read_slot(&mut self, from: Extent, bytes: &mut [u8]) -> Result<(), BackendError> {
        self.device.read_arena(from.offset, bytes)
    }

    fn write_rows_slot(&mut self, bytes: &[u8], to: Extent) -> Result<(), BackendError> {
        self.forget_headers(to);
        self.device.write_arena(to.offset, bytes)
    }

    fn write_pages_slot(&mut self, pages: LayerPages<'_>, to: Extent) -> Result<(), BackendError> {
        self.forget_headers(to);
        self.device.write_arena(to.offset, pages.bytes)?;
        self.note_headers(pages.bytes, pages.ends, to);
        Ok(())
    }

    fn page_codec(&mut self, model: ModelId) -> Result<&mut ModelCodec, BackendError> {
        self.host.page_codec(model)
    }
}
