//! Which device serves. The processor always can; a GPU is asked for by name, or taken by `auto`
//! where one can be used. A GPU asked for by name is never replaced in silence.

use crate::config::{Config, DeviceChoice, KernelCache};
use kvd_compute::{Backend, CpuBackend, CpuOptions, OpenError, affinity};
use kvd_cuda::{
    CompileEvent, CudaBackend, CudaDriver, CudaOpenError, CudaOptions, Driver, GpuDevice, GpuName,
    KERNELS, Nvrtc, ProbeError,
};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

/// Block tables, queries and partial results of one attend on a GPU; a batch that needs more is
/// answered in halves.
const SCRATCH_BYTES: u64 = 256 << 20;

/// Pinned memory of one piece of a copy to or from a GPU: enough for its full speed.
const STAGING_BYTES: u64 = 4 << 20;

/// Why no device serves.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// The processor's memory or threads.
    #[error("open device: {0}")]
    Cpu(#[from] OpenError),
    /// The GPU that was asked for.
    #[error("open device {name} (device.device): {reason}")]
    Gpu {
        /// As configured.
        name: GpuName,
        /// Why it cannot be used.
        reason: GpuUnusable,
    },
}

/// Why a GPU does not serve.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum GpuUnusable {
    /// Driver or GPU.
    #[error(transparent)]
    Probe(#[from] ProbeError),
    /// There is a GPU, and this program has no kernels for it.
    #[error(
        "{0} is there, but this program was built without the feature gpu-kernels; \
         build it with, or use device = \"cpu\""
    )]
    NoKernels(String),
    /// It serves already.
    #[error("{0} is named before, in another way")]
    Taken(String),
    /// Memory, kernels or host threads.
    #[error(transparent)]
    Open(#[from] CudaOpenError),
}

/// Opens what the configuration names.
///
/// # Errors
/// When the processor has not the memory or threads, or the GPU asked for cannot be used.
pub(crate) fn open_devices(config: &Config) -> Result<Vec<Box<dyn Backend>>, DeviceError> {
    let open = |gpu| open_gpu(config, gpu);
    choose_all(&config.devices, kvd_cuda::probe_devices, open, || open_cpu(config))
}

/// Opens each, and no GPU twice, by whatever names.
fn choose_all<T>(
    choices: &[DeviceChoice],
    probe: impl Fn() -> Result<Vec<Result<GpuDevice, ProbeError>>, ProbeError>,
    gpu: impl Fn(GpuDevice) -> Result<T, GpuUnusable>,
    cpu: impl Fn() -> Result<T, OpenError>,
) -> Result<Vec<T>, DeviceError> {
    let mut taken = BTreeSet::new();
    let open = |choice| {
        let once = |found: GpuDevice| {
            let uuid = found.uuid.clone();
            if taken.contains(&uuid) {
                return Err(GpuUnusable::Taken(uuid));
            }
            let opened = gpu(found)?;
            taken.insert(uuid);
            Ok(opened)
        };
        choose_device(choice, &probe, once, &cpu)
    };
    choices.iter().map(open).collect()
}

fn open_cpu(config: &Config) -> Result<Box<dyn Backend>, OpenError> {
    let options = CpuOptions {
        arena_bytes: config.pool_bytes,
        prefault: config.prefault,
        threads: config.threads,
    };
    let cores = if config.pin_threads { affinity::allowed_cores() } else { Vec::new() };
    let on_start = move |thread| {
        if let Err(error) = affinity::keep_on_one(&cores, thread) {
            tracing::warn!(thread, %error, "compute thread is not kept on a core");
        }
    };
    if config.prefault {
        tracing::info!(pool_bytes = config.pool_bytes, "touching the pool's memory");
    }
    let begun = Instant::now();
    let mut backend = CpuBackend::starting(options, on_start)?;
    if config.prefault {
        let seconds = begun.elapsed().as_secs_f64();
        tracing::info!(seconds, "the pool's memory is there");
    }
    backend.set_precision(config.precision);
    Ok(Box::new(backend))
}

fn open_gpu(config: &Config, gpu: GpuDevice) -> Result<Box<dyn Backend>, GpuUnusable> {
    if KERNELS.is_empty() {
        return Err(GpuUnusable::NoKernels(gpu.limits.name));
    }
    let options = CudaOptions {
        arena_bytes: config.pool_bytes,
        scratch_bytes: SCRATCH_BYTES,
        table_bytes: config.table_bytes,
        staging_bytes: STAGING_BYTES,
        threads: config.threads,
        graphs: config.graphs_max,
        kernel_timeout: config.kernel_timeout,
    };
    let driver = CudaDriver::open_gpu(gpu).map_err(CudaOpenError::from)?;
    let (gpu, begun) = (driver.description(), Instant::now());
    // Minutes on a GPU that is later than the kernels.
    tracing::info!(gpu, "taking GPU memory and loading kernels");
    let mut backend = CudaBackend::open_backend(Box::new(driver), KERNELS, options)?;
    tracing::info!(gpu, seconds = begun.elapsed().as_secs_f64(), "GPU kernels are loaded");
    match &config.kernel_cache {
        KernelCache::Off => {}
        KernelCache::Folder(folder) => compile_kernels(&mut backend, Some(folder.clone())),
        KernelCache::Nowhere => {
            let reason = "device.kernel_cache is empty, and so are XDG_CACHE_HOME and HOME";
            tracing::info!(reason, "kernels that are compiled for a codec are not kept");
            compile_kernels(&mut backend, None);
        }
    }
    Ok(Box::new(backend))
}

/// Has kernels compiled for codecs without kernels of their own, where there is a compiler.
fn compile_kernels(backend: &mut CudaBackend, folder: Option<PathBuf>) {
    let started = Nvrtc::open_library().map_err(|error| error.to_string()).and_then(|compiler| {
        let report = Arc::new(log_event);
        let started = backend.compile_with(Box::new(compiler), folder, report);
        started.map_err(|error| error.to_string())
    });
    if let Err(reason) = started {
        tracing::info!(reason, "codecs without a GPU kernel of their own share one");
    }
}

fn log_event(event: CompileEvent) {
    match event {
        CompileEvent::Ready { pair, from_cache, seconds } => {
            tracing::info!(pair, from_cache, seconds, "a GPU kernel of its own is ready");
        }
        CompileEvent::Failed { pair, reason } => {
            tracing::warn!(pair, reason, "no GPU kernel of its own; the shared one serves on");
        }
        CompileEvent::Damaged { path, reason } => {
            tracing::warn!(path = %path.display(), reason, "a damaged file of kernels is replaced");
        }
        CompileEvent::NotKept { path, reason } => {
            tracing::warn!(path = %path.display(), reason, "GPU kernels are not kept on disk");
        }
        other => tracing::info!(?other, "GPU kernels"),
    }
}

/// Chooses as [`open_devices`] does, over any machine.
fn choose_device<T>(
    choice: &DeviceChoice,
    probe: impl FnOnce() -> Result<Vec<Result<GpuDevice, ProbeError>>, ProbeError>,
    mut gpu: impl FnMut(GpuDevice) -> Result<T, GpuUnusable>,
    cpu: impl FnOnce() -> Result<T, OpenError>,
) -> Result<T, DeviceError> {
    let name = match choice {
        DeviceChoice::Cpu => return Ok(cpu()?),
        DeviceChoice::Auto => match first_usable(probe, gpu) {
            Ok(backend) => return Ok(backend),
            Err(NoGpuReason::NoGpu(reason)) => {
                tracing::info!(%reason, "device = \"auto\": no GPU, so the CPU serves");
                return Ok(cpu()?);
            }
            // Many times slower than was meant to be.
            Err(NoGpuReason::Unusable(reason)) => {
                tracing::warn!(reason, "device = \"auto\": no GPU can be used, so the CPU serves");
                return Ok(cpu()?);
            }
        },
        DeviceChoice::Cuda(name) => name,
    };
    let found = probe().and_then(|gpus| name.find_gpu(&gpus));
    let opened = found.map_err(GpuUnusable::from).and_then(&mut gpu);
    opened.map_err(|reason| DeviceError::Gpu { name: name.clone(), reason })
}

/// Why `auto` has no GPU.
#[derive(Debug, PartialEq)]
enum NoGpuReason {
    /// There is none, or no driver for one.
    NoGpu(ProbeError),
    /// No GPU that is there can be used: the reason for each, by its number.
    Unusable(String),
}

/// The first GPU that opens.
fn first_usable<T>(
    probe: impl FnOnce() -> Result<Vec<Result<GpuDevice, ProbeError>>, ProbeError>,
    mut gpu: impl FnMut(GpuDevice) -> Result<T, GpuUnusable>,
) -> Result<T, NoGpuReason> {
    let gpus = probe().map_err(|reason| match reason {
        ProbeError::NoLibrary | ProbeError::NoDevice => NoGpuReason::NoGpu(reason),
        _ => NoGpuReason::Unusable(reason.to_string()),
    })?;
    let mut reasons = Vec::new();
    for name in (0..gpus.len() as u32).map(GpuName::Ordinal) {
        let found = name.find_gpu(&gpus).map_err(GpuUnusable::from);
        match found.and_then(&mut gpu) {
            Ok(backend) => {
                if !reasons.is_empty() {
                    let reason = reasons.join("; ");
                    tracing::warn!(reason, "device = \"auto\": {name} serves, not one before it");
                }
                return Ok(backend);
            }
            Err(reason) => reasons.push(format!("{name}: {reason}")),
        }
    }
    Err(NoGpuReason::Unusable(reasons.join("; ")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvd_cuda::GpuLimits;

    fn gpu(ordinal: u32) -> GpuDevice {
        let uuid = format!("GPU-{ordinal}");
        GpuDevice { ordinal, uuid, limits: GpuLimits::h100() }
    }

    /// Which device a machine with these GPUs gives; GPU 1 does not open.
    fn chosen(choice: &DeviceChoice, gpus: Result<u32, ProbeError>) -> Result<String, String> {
        let probe = || gpus.map(|count| (0..count).map(|ordinal| Ok(gpu(ordinal))).collect());
        let open = |gpu: GpuDevice| match gpu.ordinal {
            1 => Err(GpuUnusable::NoKernels("H100".to_owned())),
            ordinal => Ok(format!("gpu {ordinal}")),
        };
        choose_device(choice, probe, open, || Ok("cpu".to_owned()))
            .map_err(|error| error.to_string())
    }

    #[test]
    fn the_processor_is_used_without_a_look_at_gpus() {
        let never = || unreachable!("no probe was asked for");
        let device = choose_device(&DeviceChoice::Cpu, never, |_| Ok("gpu"), || Ok("cpu")).unwrap();
        assert_eq!(device, "cpu");
    }

    #[test]
    fn auto_takes_a_gpu_where_there_is_one_and_else_the_processor() {
        assert_eq!(chosen(&DeviceChoice::Auto, Ok(2)).unwrap(), "gpu 0");
        assert_eq!(chosen(&DeviceChoice::Auto, Err(ProbeError::NoLibrary)).unwrap(), "cpu");
    }

    #[test]
    fn auto_tries_every_gpu_in_order_and_names_what_each_lacks() {
        let old = |ordinal| {
            let mut old = gpu(ordinal);
            old.limits.compute = [7, 5];
            old
        };
        // GPU 0 is too old, GPU 1 does not open.
        let mut asked = Vec::new();
        let opened = |gpu: GpuDevice| {
            asked.push(gpu.ordinal);
            match gpu.ordinal {
                1 => Err(GpuUnusable::NoKernels("H100".to_owned())),
                ordinal => Ok(ordinal),
            }
        };
        let all = || Ok(vec![Ok(old(0)), Ok(gpu(1)), Ok(gpu(2)), Ok(gpu(3))]);
        let found = first_usable(all, opened);
        assert_eq!((found.unwrap(), asked), (2, vec![1, 2]));
        let none = |_| Err::<u32, _>(GpuUnusable::NoKernels("H100".to_owned()));
        let unopened = first_usable(|| Ok(vec![Ok(old(0)), Ok(gpu(1))]), none).unwrap_err();
        let NoGpuReason::Unusable(reason) = unopened else { panic!("{unopened:?}") };
        let (first, second) = reason.split_once("; cuda:1: ").unwrap();
        assert!(first.starts_with("cuda:0: ") && first.contains("capability 7.5"), "{reason}");
        assert!(second.starts_with("H100 is there, but"), "{reason}");
    }

    #[test]
    fn no_gpu_and_none_that_can_be_used_are_told_apart() {
        let unopened = |error| first_usable(|| Err(error), Ok).unwrap_err();
        for none in [ProbeError::NoLibrary, ProbeError::NoDevice] {
            assert!(matches!(unopened(none), NoGpuReason::NoGpu(_)));
        }
        let old = ProbeError::TooOld { have: 12_080, need: 13_000 };
        let NoGpuReason::Unusable(reason) = unopened(old) else { panic!("a driver is no GPU") };
        assert!(reason.contains("version 12080"), "{reason}");
    }

    #[test]
    fn a_gpu_asked_for_by_name_is_used_or_refused_with_the_reason() {
        let by = |name: GpuName| DeviceChoice::Cuda(name);
        assert_eq!(chosen(&by(GpuName::Ordinal(2)), Ok(3)).unwrap(), "gpu 2");
        assert_eq!(chosen(&by(GpuName::Uuid("GPU-0".to_owned())), Ok(1)).unwrap(), "gpu 0");
        for (name, gpus, wanted) in [
            (GpuName::Ordinal(0), Err(ProbeError::NoLibrary), "libcuda.so is not found"),
            (GpuName::Ordinal(4), Ok(3), "there is no cuda:4: the driver finds 3 GPUs"),
            (GpuName::Uuid("GPU-9".to_owned()), Ok(3), "there is no cuda:GPU-9"),
            (GpuName::Ordinal(1), Ok(3), "without the feature gpu-kernels"),
        ] {
            let error = chosen(&by(name), gpus).unwrap_err();
            assert!(error.contains(wanted) && error.contains("device.device"), "{error}");
        }
    }

    #[test]
    fn every_device_that_is_named_is_opened_and_no_gpu_twice() {
        let probe = || Ok((0..4).map(|ordinal| Ok(gpu(ordinal))).collect());
        let open = |gpu: GpuDevice| Ok(format!("gpu {}", gpu.ordinal));
        let all =
            |choices: &[DeviceChoice]| choose_all(choices, probe, open, || Ok("cpu".to_owned()));
        let cuda = |ordinal| DeviceChoice::Cuda(GpuName::Ordinal(ordinal));
        let named = DeviceChoice::Cuda(GpuName::Uuid("GPU-2".to_owned()));
        let opened = all(&[cuda(3), named.clone(), DeviceChoice::Cpu]).unwrap();
        assert_eq!(opened, ["gpu 3", "gpu 2", "cpu"]);
        let twice = all(&[cuda(2), named]).unwrap_err().to_string();
        assert!(twice.contains("GPU-2 is named before"), "{twice}");
        let gone = all(&[cuda(0), cuda(7)]).unwrap_err().to_string();
        assert!(gone.contains("there is no cuda:7"), "{gone}");
    }
}
