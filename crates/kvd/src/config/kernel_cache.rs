//! Where kernels that are compiled while the daemon runs are kept.

use std::ffi::OsString;
use std::path::PathBuf;

/// Where kernels are kept that are compiled while the daemon runs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KernelCache {
    /// None are compiled.
    Off,
    /// Nothing says where caches are: they are compiled and not kept.
    Nowhere,
    /// This folder.
    Folder(PathBuf),
}

/// The folder of compiled kernels.
pub(super) fn kernel_cache(text: &str, variable: impl Fn(&str) -> Option<OsString>) -> KernelCache {
    let folder = |name| variable(name).filter(|path| !path.is_empty()).map(PathBuf::from);
    match text {
        "off" => KernelCache::Off,
        "" => {
            let caches = folder("XDG_CACHE_HOME").filter(|path| path.is_absolute());
            let caches = caches.or_else(|| folder("HOME").map(|home| home.join(".cache")));
            let folder = caches.map(|caches| caches.join("kvd/kernels"));
            folder.map_or(KernelCache::Nowhere, KernelCache::Folder)
        }
        path => KernelCache::Folder(PathBuf::from(path)),
    }
}
