//! Who may come in: every principal at every namespace and every rpc, and what doors refuse.
#![expect(clippy::unwrap_used, reason = "a set-up that fails is a test that fails")]

mod certificates;
mod doors;
mod limits;
mod matrix;
mod overview;
mod quotas;
mod regions;
mod swap;

#[path = "../support/mod.rs"]
mod support;

use kvd::RunningDaemon;
use std::path::PathBuf;
use tempfile::TempDir;

/// A token, whose hash is in [`principals`].
pub(crate) const fn token(name: &str) -> &str {
    name
}

/// A daemon with a file of principals, and its folder.
pub(crate) struct Guarded {
    pub(crate) running: RunningDaemon,
    pub(crate) folder: TempDir,
}

impl Guarded {
    /// Starts one over principals and further settings.
    pub(crate) async fn start(principals: &str, flags: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("principals.toml");
        std::fs::write(&file, principals).unwrap();
        let unix = folder.path().join("kvd.sock").display().to_string();
        let region = folder.path().join("region.sock").display().to_string();
        let file = file.display().to_string();
        let own = [
            ("access.principals", file.as_str()),
            ("server.listen_unix", &unix),
            ("server.listen_region", &region),
            ("namespaces.allowed", "[\"a\", \"b\"]"),
        ];
        let flags: Vec<_> = own.iter().chain(flags).copied().collect();
        Self { running: support::start(&flags).await, folder }
    }

    /// A file of its folder.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The page of metrics.
    pub(crate) fn metrics(&self) -> String {
        self.running.service().metrics().render_page()
    }
}

/// The text of a principal that shows a token of its own name.
pub(crate) fn principal(name: &str, namespaces: &[&str], roles: &[&str]) -> String {
    use sha2::{Digest, Sha256};
    let hash = Sha256::digest(token(name));
    let hash: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
    format!(
        "[[principals]]\nname = \"{name}\"\nnamespaces = {namespaces:?}\nroles = {roles:?}\n\
         tokens = [\"sha256:{hash}\"]\n"
    )
}
