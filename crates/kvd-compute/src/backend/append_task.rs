//! An append in slices, between which attends may have the device.
//!
//! Its pieces are short: some rows to test or to write, a copy, a block to encode or to place. What
//! comes of them does not depend on where the slices end. Nothing is given up on the way: whoever
//! drops a task before its outcome drops the slots that it was given.

use super::{
    AppendOutcome, AppendPlan, AppendRows, BlockAnswer, EncodeTask, EncodedPages, IncomingRows,
    PageBackend, PlannedBlock, PlannedCopy, PlannedWrite, ReserveSlot,
};
use crate::{BackendError, StagedRows, Stop};
use kvd_core::{Coded, ErrorCode, Side};
use std::ops::Range;
use std::time::{Duration, Instant};

/// Bytes of rows that are tested or written in a piece: tens of microseconds.
const PIECE_BYTES: usize = 256 << 10;

/// An append and how far it has come.
pub struct AppendTask {
    plan: AppendPlan,
    /// Tokens whose keys and values were tested, by side.
    tested: [u32; 2],
    copied: usize,
    /// Writes that are done, and rows of the next one.
    written: usize,
    written_rows: u32,
    /// Most blocks of the batch that began last; none before the first.
    batch_blocks: Option<usize>,
    batch: Option<BlockBatch>,
    /// Whether the rest of the blocks stay raw for now.
    is_packed: bool,
    packing_time: Duration,
    outcome: AppendOutcome,
}

/// Blocks that are encoded together.
struct BlockBatch {
    /// Those of the plan whose rows that stay raw are to be copied.
    keeps: Range<usize>,
    encoding: EncodeTask,
    /// Those that are encoded and not placed.
    encoded: Option<std::vec::IntoIter<Result<EncodedPages, BackendError>>>,
    /// How many of them are placed together: up to the last whose pages the device holds, which
    /// are lost with its next call of another.
    held: usize,
}

/// State of an append after a piece.
#[derive(Clone, Copy, PartialEq, Eq)]
enum AfterPiece {
    /// More pieces are left.
    More,
    /// The job at work was told to pause before it was done.
    Paused,
    Done,
}

impl AppendTask {
    /// An append of which nothing is done.
    #[must_use]
    pub fn new(plan: AppendPlan) -> Self {
        Self {
            plan,
            tested: [0; 2],
            copied: 0,
            written: 0,
            written_rows: 0,
            batch_blocks: None,
            batch: None,
            is_packed: false,
            packing_time: Duration::ZERO,
            outcome: AppendOutcome::default(),
        }
    }

    /// The question.
    #[must_use]
    pub fn plan(&self) -> &AppendPlan {
        &self.plan
    }

    /// Goes on by the steps of a backend, as [`PageBackend::append_slice`] says. One piece at least
    /// is done.
    pub(super) fn go_on<B: PageBackend + ?Sized>(
        &mut self,
        backend: &mut B,
        reserve: &mut ReserveSlot<'_>,
        stop: &Stop,
    ) -> Result<Option<AppendOutcome>, BackendError> {
        loop {
            let after = match self.write_piece(backend)? {
                AfterPiece::Done => self.pack_timed(backend, reserve, stop)?,
                more => more,
            };
            match after {
                AfterPiece::Done => break,
                AfterPiece::More if !stop.slice_is_over() => {}
                AfterPiece::More | AfterPiece::Paused => return Ok(None),
            }
        }
        let mut outcome = std::mem::take(&mut self.outcome);
        if !self.plan.blocks.is_empty() {
            outcome.packing_time = Some(self.packing_time);
            outcome.model_bytes = backend.model_bytes(self.plan.model).ok();
        }
        // Placing pages has no answer of its own: what a failed device holds is never published.
        match backend.failure() {
            None => Ok(Some(outcome)),
            Some(reason) => {
                let (code, message) = (ErrorCode::DeviceFailed, reason.to_owned());
                Err(BackendError::Device { code, message })
            }
        }
    }

    /// Tests rows, copies some or writes some to their slots; all are tested before any is written.
    fn write_piece<B: PageBackend + ?Sized>(
        &mut self,
        backend: &mut B,
    ) -> Result<AfterPiece, BackendError> {
        let plan = &self.plan;
        match &plan.rows {
            AppendRows::Host(rows) => {
                for (side, tested) in Side::BOTH.into_iter().zip(&mut self.tested) {
                    let first = *tested;
                    if first < rows.tokens {
                        *tested += tokens_of_piece(rows, rows.tokens - first);
                        let piece = rows.rows_of_side(side, first..*tested);
                        let test = backend.check(plan.model, &piece);
                        test.map_err(|error| error.later_by(first))?;
                        return Ok(AfterPiece::More);
                    }
                }
            }
            AppendRows::Staged(StagedRows { finite: Err(error), .. }) => {
                let (code, message) = (error.code(), error.to_string());
                return Err(BackendError::Device { code, message });
            }
            AppendRows::Staged(_) | AppendRows::None => {}
        }
        if let Some(copy) = plan.copies.get(self.copied) {
            self.copied += 1;
            backend.copy(plan.model, plan.layer, &copy.from, copy.rows, copy.to)?;
            return Ok(AfterPiece::More);
        }
        let Some(write) = plan.writes.get(self.written) else { return Ok(AfterPiece::Done) };
        match &plan.rows {
            AppendRows::Host(rows) => {
                let PlannedWrite { source_row, rows: all, mut to } = *write;
                let done = self.written_rows;
                let count = tokens_of_piece(rows, all - done);
                to.first_row += done;
                backend.write(plan.model, rows, source_row + done, count, to)?;
                self.written_rows += count;
                if self.written_rows == all {
                    (self.written, self.written_rows) = (self.written + 1, 0);
                }
            }
            AppendRows::Staged(staged) => {
                backend.write_staged(staged, &plan.writes)?;
                self.written = plan.writes.len();
            }
            AppendRows::None => self.written = plan.writes.len(),
        }
        Ok(AfterPiece::More)
    }

    /// [`AppendTask::pack_piece`], whose time is that of packing.
    fn pack_timed<B: PageBackend + ?Sized>(
        &mut self,
        backend: &mut B,
        reserve: &mut ReserveSlot<'_>,
        stop: &Stop,
    ) -> Result<AfterPiece, BackendError> {
        let began = Instant::now();
        let after = self.pack_piece(backend, reserve, stop);
        self.packing_time += began.elapsed();
        after
    }

    /// Packs some of the plan's blocks, and notes what came of them.
    fn pack_piece<B: PageBackend + ?Sized>(
        &mut self,
        backend: &mut B,
        reserve: &mut ReserveSlot<'_>,
        stop: &Stop,
    ) -> Result<AfterPiece, BackendError> {
        if self.is_packed || self.outcome.blocks.len() == self.plan.blocks.len() {
            return Ok(AfterPiece::Done);
        }
        let Some(mut batch) = self.batch.take() else {
            self.batch = Some(self.begin_batch(backend));
            return Ok(AfterPiece::More);
        };
        if let Some(keep) = batch.next_kept(&self.plan.blocks) {
            backend.copy(self.plan.model, self.plan.layer, &keep.from, keep.rows, keep.to)?;
            self.batch = Some(batch);
            return Ok(AfterPiece::More);
        }
        if batch.encoded.is_none() {
            match backend.encode_slice(&mut batch.encoding, stop) {
                Ok(Some(encoded)) => batch.take_encoded(encoded),
                Ok(None) => {
                    self.batch = Some(batch);
                    return Ok(AfterPiece::Paused);
                }
                Err(error) => {
                    self.outcome.encode_error = Some(error);
                    self.is_packed = true;
                    return Ok(AfterPiece::Done);
                }
            }
        }
        while let Some(block) = batch.encoded.as_mut().and_then(Iterator::next) {
            if !self.place_block(backend, block, reserve) {
                self.is_packed = true;
                return Ok(AfterPiece::Done);
            }
            batch.held = batch.held.saturating_sub(1);
            if batch.held == 0 {
                self.batch = batch.has_encoded().then_some(batch);
                return Ok(AfterPiece::More);
            }
        }
        Ok(AfterPiece::More)
    }

    /// The next blocks to encode together.
    fn begin_batch<B: PageBackend + ?Sized>(&mut self, backend: &mut B) -> BlockBatch {
        let (plan, first) = (&self.plan, self.outcome.blocks.len());
        let most = plan.batch_blocks_max();
        let next = match self.batch_blocks {
            Some(last) => last.saturating_mul(2).min(most),
            None => {
                if let Some(queries) = &plan.queries {
                    // They only measure: an append does not fail for want of them.
                    let set = backend.set_queries(plan.model, plan.layer, queries);
                    self.outcome.query_error = set.err();
                }
                // Where the pool was full, one block finds out at little cost whether it still is.
                if plan.blocks.iter().any(|block| block.retried) { 1 } else { most }
            }
        };
        self.batch_blocks = Some(next);
        let blocks = first..plan.blocks.len().min(first.saturating_add(next));
        let sources = plan.blocks[blocks.clone()].iter().map(|block| block.source).collect();
        let (model, layer) = (plan.model, plan.layer);
        let encoding = EncodeTask { model, layer, blocks: sources, under_way: None };
        BlockBatch { keeps: blocks, encoding, encoded: None, held: 0 }
    }

    /// Moves the pages of a block to a slot. False where the pool has no room for them: then it has
    /// none for the rest.
    fn place_block<B: PageBackend + ?Sized>(
        &mut self,
        backend: &mut B,
        block: Result<EncodedPages, BackendError>,
        reserve: &mut ReserveSlot<'_>,
    ) -> bool {
        self.outcome.blocks.push(match block {
            Ok(mut pages) => {
                let Some(slot) = reserve(pages.size_bytes()) else { return false };
                backend.move_pages(&pages, slot);
                pages.bytes = Vec::new();
                BlockAnswer::Packed(pages)
            }
            Err(error) => BlockAnswer::Refused(error),
        });
        true
    }
}

impl BlockBatch {
    /// The next rows to copy that stay raw.
    fn next_kept<'a>(&mut self, blocks: &'a [PlannedBlock]) -> Option<&'a PlannedCopy> {
        self.keeps.find_map(|index| blocks[index].keep.as_ref())
    }

    fn take_encoded(&mut self, encoded: Vec<Result<EncodedPages, BackendError>>) {
        let is_held = |block: &Result<EncodedPages, BackendError>| {
            block.as_ref().is_ok_and(|pages| pages.held.is_some())
        };
        self.held = encoded.iter().rposition(is_held).map_or(0, |last| last + 1);
        self.encoded = Some(encoded.into_iter());
    }

    /// Whether blocks are left to be placed.
    fn has_encoded(&self) -> bool {
        self.encoded.as_ref().is_some_and(|left| left.len() > 0)
    }
}

/// How many of `left` tokens are tested or written in a piece.
fn tokens_of_piece(rows: &IncomingRows, left: u32) -> u32 {
    let token_bytes = (rows.k.len() + rows.v.len()) / rows.tokens.max(1) as usize;
    let tokens = PIECE_BYTES / token_bytes.max(1);
    u32::try_from(tokens).unwrap_or(u32::MAX).clamp(1, left.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        CpuBackend, CpuOptions, EncodeSource, HeldPages, PageBackend, RawTarget, TransferBackend,
    };
    use bytes::Bytes;
    use kvd_codec::{ModelCodec, resolve_spec};
    use kvd_core::{DType, Extent, Geometry, LayerIndex, ModelId, RopePairing};
    use std::sync::Arc;

    const MODEL: ModelId = ModelId(1);
    const LAYER: LayerIndex = LayerIndex(0);
    const BLOCKS: u32 = 4;
    /// Where slots of pages begin.
    const PAGES: u64 = 1 << 20;

    fn backend(head_dim: u32) -> CpuBackend {
        let options = CpuOptions { arena_bytes: 1 << 21, prefault: false, threads: 1 };
        let mut backend = CpuBackend::new(options).unwrap();
        let (head_dim_k, head_dim_v) = (head_dim, head_dim);
        let (block_tokens, dtype, rope_pairing) = (16, DType::F16, RopePairing::Half);
        let (layers, kv_heads) = (1, 1);
        let geometry = Geometry {
            layers,
            kv_heads,
            head_dim_k,
            head_dim_v,
            block_tokens,
            dtype,
            rope_pairing,
        };
        let spec = resolve_spec("kivi-4").unwrap();
        backend.register(MODEL, ModelCodec::new(geometry, spec, None).unwrap());
        backend
    }

    fn slot(block: u32, rows: u32, head_dim: u32) -> RawTarget {
        let len = u64::from(rows * head_dim) * 4;
        let extent = Extent { offset: u64::from(block) * len, len };
        RawTarget { extent, capacity_rows: rows, first_row: 0 }
    }

    fn rows(tokens: u32, head_dim: u32) -> [Vec<u8>; 2] {
        let values: Vec<f32> = (0..tokens * head_dim).map(|i| (i * 37 % 101) as f32).collect();
        let mut bytes = vec![0; values.len() * 2];
        DType::F16.narrow_values(&values, &mut bytes);
        [bytes.clone(), bytes]
    }

    fn plan(tokens: u32, [k, v]: [Vec<u8>; 2]) -> AppendPlan {
        let rows = AppendRows::Host(IncomingRows { tokens, k: Bytes::from(k), v: Bytes::from(v) });
        let (copies, writes, blocks) = (Vec::new(), Vec::new(), Vec::new());
        let (model, layer, block_bytes, queries) = (MODEL, LAYER, 1 << 10, None);
        AppendPlan { model, layer, rows, copies, writes, blocks, block_bytes, queries }
    }

    /// Blocks of 16 tokens that are written and packed.
    fn packing() -> AppendPlan {
        let mut plan = plan(16 * BLOCKS, rows(16 * BLOCKS, 32));
        for block in 0..BLOCKS {
            let to = slot(block, 16, 32);
            plan.writes.push(PlannedWrite { source_row: 16 * block, rows: 16, to });
            let RawTarget { extent, capacity_rows, first_row } = to;
            let source = EncodeSource { extent, capacity_rows, first_row, rows: 16 };
            plan.blocks.push(PlannedBlock { source, keep: None, retried: false });
        }
        plan
    }

    /// An append that pauses whenever it looks, or never.
    struct Run {
        backend: CpuBackend,
        slices: usize,
        reserved: u64,
    }

    impl Run {
        fn new(head_dim: u32) -> Self {
            Self { backend: backend(head_dim), slices: 0, reserved: PAGES }
        }

        fn append(
            &mut self,
            plan: AppendPlan,
            pauses: bool,
        ) -> Result<AppendOutcome, BackendError> {
            let stop = Stop { outrun: Arc::new(pauses.into()), ..Stop::never() };
            let mut task = AppendTask::new(plan);
            loop {
                self.slices += 1;
                let reserved = &mut self.reserved;
                let mut reserve = |len| {
                    *reserved += len;
                    Some(Extent { offset: *reserved - len, len })
                };
                if let Some(outcome) = self.backend.append_slice(&mut task, &mut reserve, &stop)? {
                    return Ok(outcome);
                }
            }
        }

        fn pages(&mut self) -> Vec<u8> {
            let mut bytes = vec![0; (self.reserved - PAGES) as usize];
            let extent = Extent { offset: PAGES, len: bytes.len() as u64 };
            self.backend.read_slot(extent, &mut bytes).unwrap();
            bytes
        }
    }

    #[test]
    fn slices_make_the_pages_of_one_call_and_end_after_each_piece() {
        let [mut whole, mut sliced] = [32, 32].map(Run::new);
        let outcome = whole.append(packing(), false).unwrap();
        let of_slices = sliced.append(packing(), true).unwrap();
        assert_eq!((outcome.blocks.len(), of_slices.blocks.len()), (4, 4));
        assert_eq!(whole.pages(), sliced.pages());
        assert!(!whole.pages().is_empty());
        // Keys and values are tested, four blocks written, a batch begun, three blocks encoded, the
        // fourth encoded and a block placed, the other three placed; the last finds nothing left.
        assert_eq!((whole.slices, sliced.slices), (1, 2 + 4 + 1 + 3 + 1 + 3 + 1));
    }

    #[test]
    fn no_piece_ends_before_the_last_block_that_the_device_holds() {
        let (mut backend, stop) = (backend(32), Stop::never());
        let mut task = AppendTask::new(packing());
        while task.write_piece(&mut backend).unwrap() == AfterPiece::More {}
        let mut at = PAGES;
        let mut reserve = |len| {
            at += len;
            Some(Extent { offset: at - len, len })
        };
        // A batch begins, and its first block is placed.
        for _ in 0..2 {
            task.pack_piece(&mut backend, &mut reserve, &stop).unwrap();
        }
        assert_eq!(task.outcome.blocks.len(), 1);
        let batch = task.batch.as_mut().unwrap();
        let mut left: Vec<_> = batch.encoded.take().unwrap().collect();
        left[1].as_mut().unwrap().held = Some(HeldPages { call: 1, block: 2 });
        batch.take_encoded(left);
        let mut placed = || {
            task.pack_piece(&mut backend, &mut reserve, &stop).unwrap();
            task.outcome.blocks.len()
        };
        assert_eq!([placed(), placed()], [3, 4]);
    }

    #[test]
    fn a_value_that_is_no_number_is_named_and_nothing_was_written_whatever_the_pieces() {
        let (tokens, head_dim, bad) = (600, 512, 570);
        let mut of_rows = rows(tokens, head_dim);
        let at = ((bad * head_dim + 9) * 2) as usize;
        of_rows[1][at..at + 2].copy_from_slice(&0x7e00u16.to_le_bytes());
        for pauses in [false, true] {
            let mut run = Run::new(head_dim);
            let mut plan = plan(tokens, of_rows.clone());
            let to = slot(0, 512, head_dim);
            plan.writes.push(PlannedWrite { source_row: 0, rows: 512, to });
            let error = run.append(plan, pauses).unwrap_err().to_string();
            assert!(error.starts_with("V of token 570, head 0, channel 9 is NaN"), "{error}");
            // Pieces of 128 tokens: five of keys, and the fifth of values is refused.
            assert_eq!(run.slices, if pauses { 10 } else { 1 });
            let mut written = vec![0; 1 << 10];
            run.backend.read_slot(Extent { offset: 0, len: 1 << 10 }, &mut written).unwrap();
            assert!(written.iter().all(|byte| *byte == 0));
        }
    }

    #[test]
    fn a_write_of_many_rows_is_cut_and_lands_where_it_would_whole() {
        let (tokens, head_dim) = (300, 512);
        let mut written = [false, true].map(|pauses| {
            let mut run = Run::new(head_dim);
            let mut plan = plan(tokens, rows(tokens, head_dim));
            let to = RawTarget { first_row: 3, ..slot(0, 303, head_dim) };
            plan.writes.push(PlannedWrite { source_row: 0, rows: tokens, to });
            run.append(plan, pauses).unwrap();
            // Tests of three pieces a side, and as many pieces written.
            assert_eq!(run.slices, if pauses { 10 } else { 1 });
            let mut bytes = vec![0; to.extent.len as usize];
            run.backend.read_slot(to.extent, &mut bytes).unwrap();
            bytes
        });
        let sliced = written[1].split_off(0);
        assert!(written[0] == sliced && sliced.iter().any(|byte| *byte != 0));
    }
}
