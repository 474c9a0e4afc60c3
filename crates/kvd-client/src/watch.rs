//! Watches of the cache: which blocks are where, and every change.

use crate::client::Client;
use crate::error::ClientError;
use kvd_proto::v1;
use tonic::Streaming;

/// Where a watch can go on that ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WatchPosition {
    /// The daemon's boot, whose numbers these are.
    pub boot_id: String,
    /// The last event that was told.
    pub number: u64,
}

/// An open watch of the client's namespace.
///
/// The first answer of a watch without a position has `reset`: forget all and take what follows.
/// A picture is whole once an answer has a number. Resets come later too, where this reader was
/// too slow.
#[derive(Debug)]
pub struct BlockWatch {
    stream: Streaming<v1::WatchBlocksResponse>,
    position: Option<WatchPosition>,
}

impl Client {
    /// Watches the cache: from a position on that an earlier watch ended with, if the daemon still
    /// can, else with all blocks.
    ///
    /// # Errors
    /// `LIMIT_EXCEEDED` of watches, or as every call.
    pub async fn watch_blocks(
        &self,
        from: Option<WatchPosition>,
    ) -> Result<BlockWatch, ClientError> {
        let WatchPosition { boot_id, number } = from.clone().unwrap_or_default();
        let message = v1::WatchBlocksRequest { boot_id, after_number: number };
        // The deadline is one of the answer; the stream has none.
        let request = self.namespaced_request(message);
        let mut rpc = self.rpc.clone();
        let opened =
            self.within_deadline(async move { Ok(rpc.watch_blocks(request).await?.into_inner()) });
        Ok(BlockWatch { stream: opened.await?, position: from })
    }
}

impl BlockWatch {
    /// The next answer; waits for one, however long.
    ///
    /// # Errors
    /// Why the watch has ended: begin another with [`BlockWatch::last_position`].
    pub async fn next_answer(&mut self) -> Result<v1::WatchBlocksResponse, ClientError> {
        let answer = self.stream.message().await;
        let answer = match answer {
            Ok(Some(answer)) => answer,
            Ok(None) => {
                let message = "the stream of the watch ended".to_owned();
                return Err(ClientError::lost_connection(message));
            }
            Err(status) => return Err(status.into()),
        };
        self.position = (answer.number != 0)
            .then(|| WatchPosition { boot_id: answer.boot_id.clone(), number: answer.number });
        Ok(answer)
    }

    /// Where another watch can go on; none while the picture is not whole.
    #[must_use]
    pub fn last_position(&self) -> Option<&WatchPosition> {
        self.position.as_ref()
    }
}
