//! Waiting for a condition that only polling can see.

use std::time::Duration;

/// Asks until the answer is yes. Gives up after ten seconds, which no healthy run comes near.
///
/// # Panics
/// When it gives up.
pub async fn eventually(what: &str, mut condition: impl AsyncFnMut() -> bool) {
    let patience = tokio::time::Instant::now() + Duration::from_secs(10);
    while !condition().await {
        assert!(tokio::time::Instant::now() < patience, "never happened: {what}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}
