//! Backends of tests that hand every call on to another one, except those that they change.
//!
//! A type says in [`ForwardingBackend`] which backend is behind it and overrides what it changes;
//! [`mount_forwarding`](crate::mount_forwarding) makes it a [`Backend`]. [`InjectedFaults`] make
//! calls fail on the way.

use kvd_codec::{LayerPages, ModelCodec};
use kvd_compute::{
    AppendSteps, AttendBackend, AttendPlan, AttendTask, Attended, Backend, BackendError,
    DeviceInfo, DeviceRegion, EncodeSource, EncodeTask, EncodedBlocks, EncodedPages, IncomingRows,
    Launches, LoadPlan, LoadedRows, ModelBytes, OpenedRegion, PageBackend, PlannedWrite, RawTarget,
    RegionBackend, RegionHandle, RegionPlaces, RegionRows, Source, StagedRows, Stop,
    TransferBackend,
};
use kvd_core::{Extent, LayerIndex, ModelId};
use std::sync::atomic::{AtomicBool, Ordering};

#[doc(hidden)]
pub use {kvd_codec as codec, kvd_compute as compute, kvd_core as core};

/// Why a backend that [`InjectedFaults`] lost must not be called any more.
pub const LOST: &str = "the GPU fell off the bus";

/// InjectedFaults that a test injects while a backend works; none at first.
#[derive(Debug, Default)]
pub struct InjectedFaults {
    loses_device: AtomicBool,
    is_lost: AtomicBool,
    fails_block: AtomicBool,
}

impl InjectedFaults {
    /// Whether the next write of rows finds the device lost. One that is lost stays so.
    pub fn lose_in_write(&self, is_lost: bool) {
        self.loses_device.store(is_lost, Ordering::SeqCst);
    }

    /// The device is lost from now on.
    pub fn lose_device(&self) {
        self.is_lost.store(true, Ordering::SeqCst);
    }

    /// The first block of the next call of `encode` has an error.
    pub fn fail_next_block(&self) {
        self.fails_block.store(true, Ordering::SeqCst);
    }

    /// Whether a write is skipped because the device is lost. As where a call cannot answer, only
    /// `failure` tells.
    #[doc(hidden)]
    pub fn skips_write(&self) -> bool {
        let is_lost = self.loses_device.load(Ordering::SeqCst);
        self.is_lost.fetch_or(is_lost, Ordering::SeqCst);
        is_lost
    }

    /// Why the device must not be called any more.
    #[doc(hidden)]
    pub fn loss_reason(&self) -> Option<&'static str> {
        self.is_lost.load(Ordering::SeqCst).then_some(LOST)
    }

    /// Puts the error of [`InjectedFaults::fail_next_block`] in its place.
    #[doc(hidden)]
    pub fn spoil_blocks(&self, blocks: &mut EncodedBlocks) {
        if let Some(first) = blocks.first_mut()
            && self.fails_block.swap(false, Ordering::SeqCst)
        {
            *first = Err(BackendError::NonFiniteQuery { index: 0, value: f32::NAN });
        }
    }
}

/// Declares the calls of a backend as methods that hand them on.
macro_rules! declare_calls {
    ($(read $read:ident($($argument:ident: $type:ty),*) -> $answer:ty;)*
     $(write $write:ident($($given:ident: $kind:ty),*) $(-> $result:ty)?;)*) => {
        /// A backend before another one. Every call is handed on unless it is overridden; the
        /// steps of an append are, so that an append meets all that is overridden.
        #[expect(missing_docs, reason = "the traits of `kvd_compute` document them")]
        pub trait ForwardingBackend: Send {
            /// The backend that calls are handed on to.
            type Inner: Backend;

            fn inner_backend(&self) -> &Self::Inner;
            fn inner_backend_mut(&mut self) -> &mut Self::Inner;
            /// InjectedFaults of calls, where a test injects some.
            fn injected_faults(&self) -> Option<&InjectedFaults> {
                None
            }
            $(fn $read(&self $(, $argument: $type)*) -> $answer {
                self.inner_backend().$read($($argument),*)
            })*
            $(fn $write(&mut self $(, $given: $kind)*) $(-> $result)? {
                self.inner_backend_mut().$write($($given),*)
            })*
            fn page_codec(&mut self, model: ModelId) -> Result<&mut ModelCodec, BackendError> {
                self.inner_backend_mut().page_codec(model)
            }
        }
    };
}

declare_calls! {
    read info() -> DeviceInfo;
    read supports(codec: &ModelCodec) -> Result<(), BackendError>;
    read failure() -> Option<&str>;
    read model_bytes(model: ModelId) -> Result<ModelBytes, BackendError>;
    read check(model: ModelId, rows: &IncomingRows) -> Result<(), BackendError>;
    read shares_pages() -> bool;
    read is_small_plan(plan: &AttendPlan) -> bool;
    read launches() -> Launches;
    write register(model: ModelId, codec: ModelCodec);
    write unregister(model: ModelId);
    write load(plan: &LoadPlan) -> Result<LoadedRows, BackendError>;
    write copy(model: ModelId, layer: LayerIndex, from: &Source, count: u32, to: RawTarget)
        -> Result<(), BackendError>;
    write write(model: ModelId, rows: &IncomingRows, source_row: u32, count: u32, to: RawTarget)
        -> Result<(), BackendError>;
    write write_staged(staged: &StagedRows, writes: &[PlannedWrite]) -> Result<(), BackendError>;
    write set_queries(model: ModelId, layer: LayerIndex, heads: &[Vec<f32>])
        -> Result<(), BackendError>;
    write encode(model: ModelId, layer: LayerIndex, blocks: &[EncodeSource])
        -> Result<EncodedBlocks, BackendError>;
    write encode_slice(task: &mut EncodeTask, stop: &Stop)
        -> Result<Option<EncodedBlocks>, BackendError>;
    write move_pages(pages: &EncodedPages, to: Extent);
    write attend(plan: &AttendPlan) -> Result<Attended, BackendError>;
    write attend_slice(task: &mut AttendTask, stop: &Stop)
        -> Result<Option<Attended>, BackendError>;
    write open_region(handle: RegionHandle, bytes: u64) -> Result<OpenedRegion, BackendError>;
    write close_region(region: DeviceRegion);
    write read_region(region: DeviceRegion, offset: u64, bytes: &mut [u8])
        -> Result<(), BackendError>;
    write write_region(region: DeviceRegion, offset: u64, bytes: &[u8])
        -> Result<(), BackendError>;
    write attend_in_place(plan: &AttendPlan, places: &RegionPlaces, launched: &mut dyn FnMut())
        -> Result<u64, BackendError>;
    write stage_rows(model: ModelId, rows: &RegionRows)
        -> Result<Option<StagedRows>, BackendError>;
    write read_slot(from: Extent, bytes: &mut [u8]) -> Result<(), BackendError>;
    write write_rows_slot(bytes: &[u8], to: Extent) -> Result<(), BackendError>;
    write write_pages_slot(pages: LayerPages<'_>, to: Extent) -> Result<(), BackendError>;
}

/// Makes a type that implements [`ForwardingBackend`] a [`Backend`]: `mount_forwarding!(Device)`,
/// or `mount_forwarding!(InPlace<B>, B: Backend)`.
#[macro_export]
macro_rules! mount_forwarding {
    ($type:ty $(, $parameter:ident: $bound:path)?) => {
        const _: () = {
            use $crate::forward::ForwardingBackend as Forwarding;
            use $crate::forward::codec::{LayerPages, ModelCodec};
            use $crate::forward::compute::{
                AppendSteps, AttendBackend, AttendPlan, AttendTask, Attended, BackendError,
                DeviceInfo, DeviceRegion, EncodeSource, EncodeTask, EncodedBlocks, EncodedPages,
                IncomingRows, Launches, LoadPlan, LoadedRows, ModelBytes, OpenedRegion,
                PageBackend, PlannedWrite, RawTarget, RegionBackend, RegionHandle, RegionPlaces,
                RegionRows, Source, StagedRows, Stop, TransferBackend,
            };
            use $crate::forward::core::{Extent, LayerIndex, ModelId};

            impl$(<$parameter: $bound>)? PageBackend for $type {
                $crate::forward_calls! {
                    read info() -> DeviceInfo;
                    lost failure() -> Option<&str>;
                    read supports(codec: &ModelCodec) -> Result<(), BackendError>;
                    read model_bytes(model: ModelId) -> Result<ModelBytes, BackendError>;
                    write register(model: ModelId, codec: ModelCodec) -> ();
                    write unregister(model: ModelId) -> ();
                    write load(plan: &LoadPlan) -> Result<LoadedRows, BackendError>;
                }
            }

            impl$(<$parameter: $bound>)? AppendSteps for $type {
                $crate::forward_calls! {
                    read check(model: ModelId, rows: &IncomingRows) -> Result<(), BackendError>;
                    write copy(model: ModelId, layer: LayerIndex, from: &Source, count: u32,
                        to: RawTarget) -> Result<(), BackendError>;
                    write set_queries(model: ModelId, layer: LayerIndex, heads: &[Vec<f32>])
                        -> Result<(), BackendError>;
                    write move_pages(pages: &EncodedPages, to: Extent) -> ();
                    skipped write(model: ModelId, rows: &IncomingRows, source_row: u32,
                        count: u32, to: RawTarget) -> Result<(), BackendError>;
                    skipped write_staged(staged: &StagedRows, writes: &[PlannedWrite])
                        -> Result<(), BackendError>;
                }

                fn encode(
                    &mut self,
                    model: ModelId,
                    layer: LayerIndex,
                    blocks: &[EncodeSource],
                ) -> Result<EncodedBlocks, BackendError> {
                    let mut encoded = Forwarding::encode(self, model, layer, blocks)?;
                    if let Some(faults) = Forwarding::injected_faults(self) {
                        faults.spoil_blocks(&mut encoded);
                    }
                    Ok(encoded)
                }

                fn encode_slice(
                    &mut self,
                    task: &mut EncodeTask,
                    stop: &Stop,
                ) -> Result<Option<EncodedBlocks>, BackendError> {
                    let mut encoded = Forwarding::encode_slice(self, task, stop)?;
                    if let (Some(faults), Some(blocks)) =
                        (Forwarding::injected_faults(self), &mut encoded)
                    {
                        faults.spoil_blocks(blocks);
                    }
                    Ok(encoded)
                }
            }

            impl$(<$parameter: $bound>)? AttendBackend for $type {
                $crate::forward_calls! { read shares_pages() -> bool;
                    read is_small_plan(plan: &AttendPlan) -> bool;
                    read launches() -> Launches;
                    write attend(plan: &AttendPlan) -> Result<Attended, BackendError>;
                    write attend_slice(task: &mut AttendTask, stop: &Stop)
                        -> Result<Option<Attended>, BackendError>;
                }
            }

            impl$(<$parameter: $bound>)? RegionBackend for $type {
                $crate::forward_calls! {
                    write open_region(handle: RegionHandle, bytes: u64)
                        -> Result<OpenedRegion, BackendError>;
                    write close_region(region: DeviceRegion) -> ();
                    write read_region(region: DeviceRegion, offset: u64, bytes: &mut [u8])
                        -> Result<(), BackendError>;
                    write write_region(region: DeviceRegion, offset: u64, bytes: &[u8])
                        -> Result<(), BackendError>;
                    write attend_in_place(plan: &AttendPlan, places: &RegionPlaces,
                        launched: &mut dyn FnMut()) -> Result<u64, BackendError>;
                    write stage_rows(model: ModelId, rows: &RegionRows)
                        -> Result<Option<StagedRows>, BackendError>;
                }
            }

            impl$(<$parameter: $bound>)? TransferBackend for $type {
                $crate::forward_calls! {
                    write read_slot(from: Extent, bytes: &mut [u8]) -> Result<(), BackendError>;
                    write write_rows_slot(bytes: &[u8], to: Extent) -> Result<(), BackendError>;
                    write write_pages_slot(pages: LayerPages<'_>, to: Extent)
                        -> Result<(), BackendError>;
                }

                fn page_codec(&mut self, model: ModelId) -> Result<&mut ModelCodec, BackendError> {
                    Forwarding::page_codec(self, model)
                }
            }
        };
    };
}

/// Calls of a backend's trait that [`ForwardingBackend`] answers.
#[doc(hidden)]
#[macro_export]
macro_rules! forward_calls {
    () => {};
    (read $call:ident($($argument:ident: $type:ty),* $(,)?) -> $answer:ty; $($rest:tt)*) => {
        fn $call(&self $(, $argument: $type)*) -> $answer {
            $crate::forward::ForwardingBackend::$call(self $(, $argument)*)
        }
        $crate::forward_calls! { $($rest)* }
    };
    (write $call:ident($($argument:ident: $type:ty),* $(,)?) -> $answer:ty; $($rest:tt)*) => {
        fn $call(&mut self $(, $argument: $type)*) -> $answer {
            $crate::forward::ForwardingBackend::$call(self $(, $argument)*)
        }
        $crate::forward_calls! { $($rest)* }
    };
    (lost $call:ident() -> $answer:ty; $($rest:tt)*) => {
        fn $call(&self) -> $answer {
            let faults = $crate::forward::ForwardingBackend::injected_faults(self);
            let lost = faults.and_then(|faults| faults.loss_reason());
            lost.or_else(|| $crate::forward::ForwardingBackend::$call(self))
        }
        $crate::forward_calls! { $($rest)* }
    };
    (skipped $call:ident($($argument:ident: $type:ty),*) -> $answer:ty; $($rest:tt)*) => {
        fn $call(&mut self $(, $argument: $type)*) -> $answer {
            match $crate::forward::ForwardingBackend::injected_faults(self) {
                Some(faults) if faults.skips_write() => Ok(()),
                _ => $crate::forward::ForwardingBackend::$call(self $(, $argument)*),
            }
        }
        $crate::forward_calls! { $($rest)* }
    };
}
