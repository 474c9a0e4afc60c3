//! Watches of the cache, with the real daemon: a picture drawn from what a watch tells is what the
//! daemon has, whatever the watcher missed.

use super::cache::{keys, spec, store};
use super::disk::{PUBLISHED, TOKENS, kill, matched, publish_durably, read, register, start};
use super::doors::page;
use super::process::Process;
use kvd_client::{
    BlockChange, BlockTier, BlockWatch, Client, ClientError, Endpoint, ErrorCode, ModelId,
    Namespace, WatchPosition,
};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

const PAGES: usize = 4;
const PATIENCE: Duration = Duration::from_secs(20);

/// Blocks by place and key, with their parents, as a router would have them.
#[derive(Clone, Debug, Default, PartialEq)]
struct Picture {
    blocks: BTreeMap<(i32, Vec<u8>), Vec<u8>>,
    resets: usize,
    is_whole: bool,
}

impl Picture {
    async fn take_answer(&mut self, watch: &mut BlockWatch) {
        let answer = tokio::time::timeout(PATIENCE, watch.next_answer()).await.expect("in time");
        let answer = answer.expect("an answer");
        if answer.reset {
            self.blocks.clear();
            self.resets += 1;
        }
        self.is_whole = answer.number != 0;
        for event in answer.events {
            let (change, tier) = (event.change(), event.tier);
            if change == BlockChange::Cleared {
                self.blocks.clear();
                continue;
            }
            assert!(event.model == "model" && event.model_id != 0);
            let keys = event.keys.expect("keys");
            assert_eq!((keys.key_bytes, keys.key_tokens), (16, 64));
            let mut parent = event.parent_key.to_vec();
            for key in keys.keys.chunks_exact(16) {
                let place = (tier, key.to_vec());
                if change == BlockChange::Stored {
                    self.blocks.insert(place, parent);
                } else {
                    self.blocks.remove(&place);
                }
                parent = key.to_vec();
            }
        }
    }

    /// Keys of a tier.
    fn keys_in(&self, tier: BlockTier) -> BTreeSet<&[u8]> {
        let of_tier = self.blocks.keys().filter(|(of, _)| *of == i32::from(tier));
        of_tier.map(|(_, key)| &key[..]).collect()
    }

    async fn take_until(&mut self, watch: &mut BlockWatch, is_so: impl Fn(&Self) -> bool) {
        while !self.is_whole || !is_so(self) {
            self.take_answer(watch).await;
        }
    }
}

/// Keys of the pages of texts.
fn page_keys(texts: &[u64]) -> Vec<Vec<u8>> {
    let of_text = |text: &u64| keys(*text, PUBLISHED).keys.to_vec();
    let engine_keys = texts.iter().map(of_text);
    engine_keys.flat_map(|keys| pages_of(&keys)).collect()
}

fn pages_of(keys: &[u8]) -> Vec<Vec<u8>> {
    keys.chunks_exact(16).skip(3).step_by(4).map(<[u8]>::to_vec).collect()
}

fn set_of(keys: &[Vec<u8>]) -> BTreeSet<&[u8]> {
    keys.iter().map(Vec::as_slice).collect()
}

async fn publish(client: &Client, model: ModelId, text: u64) {
    let sequence = client.open_sequence(model).await.expect("open");
    store(client, sequence, text, 0, TOKENS).await;
    client.publish_blocks(sequence, 0, keys(text, TOKENS)).await.expect("publish");
    client.close_sequence(sequence).await.expect("close");
}

/// A client in a namespace.
async fn client_in(daemon: &Process, namespace: &str) -> Client {
    let endpoint: Endpoint = format!("http://{}", daemon.tcp()).parse().expect("an endpoint");
    let client = Client::connect(endpoint).await.expect("connect");
    client.with_namespace(&Namespace::new(namespace).expect("a namespace"))
}

async fn model_in(client: &Client) -> ModelId {
    client.register_model(spec("model", "raw")).await.expect("register").model
}

fn metric(daemon: &Process, series: &str) -> f64 {
    let page = page(daemon.admin(), "/metrics");
    let line = page.lines().find_map(|line| line.strip_prefix(series)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {series} in {page}")).trim().parse().expect("a number")
}

/// Why a watch has ended.
async fn end_of(watch: &mut BlockWatch) -> ClientError {
    loop {
        if let Err(error) = watch.next_answer().await {
            return error;
        }
    }
}

fn resets(daemon: &Process, reason: &str) -> f64 {
    metric(daemon, &format!("kvd_event_resets_total{{reason=\"{reason}\"}}"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_watchers_draw_one_picture_and_a_broken_watch_goes_on_where_it_ended() {
    let daemon = Process::start(&[]);
    let client = daemon.client().await;
    let model = model_in(&client).await;
    publish(&client, model, 1).await;
    let (mut early, mut late) = (Picture::default(), Picture::default());
    let mut first = client.watch_blocks(None).await.expect("watch");
    let known = page_keys(&[1]);
    early.take_until(&mut first, |of| of.keys_in(BlockTier::Pool) == set_of(&known)).await;
    // The chain is told with its parents.
    assert_eq!(early.blocks[&(1, known[0].clone())], b"");
    assert_eq!(early.blocks[&(1, known[3].clone())], known[2]);
    let mut second = client.watch_blocks(None).await.expect("watch");
    publish(&client, model, 2).await;
    let both = page_keys(&[1, 2]);
    early.take_until(&mut first, |of| of.keys_in(BlockTier::Pool) == set_of(&both)).await;
    late.take_until(&mut second, |of| of.keys_in(BlockTier::Pool) == set_of(&both)).await;
    assert_eq!(early.blocks, late.blocks);
    assert_eq!(metric(&daemon, "kvd_open_streams{rpc=\"WatchBlocks\"}"), 2.0);
    // It misses a drop and a publish.
    let position = first.last_position().cloned();
    drop(first);
    client.drop_blocks(model, &[keys(1, TOKENS)]).await.expect("drop");
    publish(&client, model, 3).await;
    let mut first = client.watch_blocks(position.clone()).await.expect("watch");
    let left = page_keys(&[2, 3]);
    early.take_until(&mut first, |of| of.keys_in(BlockTier::Pool) == set_of(&left)).await;
    assert_eq!((early.resets, resets(&daemon, "gone")), (1, 0.0));
    // Numbers that are not there begin anew.
    let position = position.expect("a position");
    for wrong in [
        WatchPosition { number: 1, ..position.clone() },
        WatchPosition { number: u64::MAX, ..position.clone() },
        WatchPosition { boot_id: "another".to_owned(), ..position },
    ] {
        let mut watch = client.watch_blocks(Some(wrong)).await.expect("watch");
        let mut anew = Picture::default();
        anew.take_until(&mut watch, |of| of.resets == 1).await;
        assert_eq!(anew.blocks, early.blocks);
    }
    assert_eq!(resets(&daemon, "gone"), 3.0);
    // Without its model nothing is found.
    client.unregister_model(model).await.expect("unregister");
    early.take_until(&mut first, |of| of.blocks.is_empty()).await;
    assert_eq!(early.resets, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watcher_that_does_not_read_holds_up_nobody_and_is_told_to_begin_anew() {
    let daemon = Process::start(&["--set", "cache.events.ring=8"]);
    let client = daemon.client().await;
    let model = model_in(&client).await;
    let mut watch = client.watch_blocks(None).await.expect("watch");
    let mut picture = Picture::default();
    picture.take_until(&mut watch, |of| of.resets == 1).await;
    // More events than are kept, again and again, until answers fill all that is on the way.
    let mut texts = 1;
    while resets(&daemon, "behind") == 0.0 {
        for _ in 0..8 {
            publish(&client, model, texts).await;
            texts += 1;
        }
        client.drop_blocks(model, &[]).await.expect("drop");
        assert!(texts < 20_000, "it never falls behind");
    }
    publish(&client, model, 0).await;
    let known = page_keys(&[0]);
    picture.take_until(&mut watch, |of| of.keys_in(BlockTier::Pool) == set_of(&known)).await;
    assert!(picture.resets >= 2, "{picture:?}");
    assert_eq!(matched(&client, model, 0).await, [PUBLISHED; 2]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watch_tells_nothing_of_other_namespaces() {
    let settings = ["namespaces.allowed=[\"ours\", \"others\"]", "cache.events.watchers_max=2"];
    let daemon = Process::start(&settings.map(|setting| ["--set", setting]).concat());
    let (ours, others) = (client_in(&daemon, "ours").await, client_in(&daemon, "others").await);
    let (our_model, other_model) = (model_in(&ours).await, model_in(&others).await);
    publish(&others, other_model, 1).await;
    let mut watch = ours.watch_blocks(None).await.expect("watch");
    let mut picture = Picture::default();
    picture.take_until(&mut watch, |of| of.resets == 1).await;
    let before = watch.last_position().expect("whole").number;
    let mut of_others = others.watch_blocks(None).await.expect("watch");
    publish(&others, other_model, 2).await;
    publish(&ours, our_model, 1).await;
    let known = page_keys(&[1]);
    picture.take_until(&mut watch, |of| of.keys_in(BlockTier::Pool) == set_of(&known)).await;
    // Numbers tell nothing either.
    assert_eq!(watch.last_position().expect("whole").number, before + PAGES as u64);
    let both = page_keys(&[1, 2]);
    let mut theirs = Picture::default();
    theirs.take_until(&mut of_others, |of| of.keys_in(BlockTier::Pool) == set_of(&both)).await;
    let refused = ours.watch_blocks(None).await.expect_err("a third");
    assert_eq!(refused.code, Some(ErrorCode::LimitExceeded), "{refused}");
    assert!(refused.message.contains("cache.events.watchers_max is 2"), "{refused}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_restart_the_boot_is_another_and_what_is_on_disk_is_told_by_its_keys() {
    let folder = tempfile::tempdir().expect("a folder");
    let first = start(folder.path(), &[]);
    let client = first.client().await;
    let model = register(&client, "kivi-4", &[]).await;
    let mut watch = client.watch_blocks(None).await.expect("watch");
    publish_durably(&client, model, 1).await;
    let known = page_keys(&[1]);
    let mut picture = Picture::default();
    picture
        .take_until(&mut watch, |of| {
            of.keys_in(BlockTier::Disk) == set_of(&known)
                && of.keys_in(BlockTier::Pool) == set_of(&known)
        })
        .await;
    let position = watch.last_position().cloned();
    kill(first);
    let ended = end_of(&mut watch).await;
    assert_eq!(ended.code, None, "{ended}");

    let second = start(folder.path(), &[]);
    let client = second.client().await;
    let mut watch = client.watch_blocks(position.clone()).await.expect("watch");
    let mut again = Picture::default();
    again.take_until(&mut watch, |of| of.resets == 1).await;
    let now = watch.last_position().cloned().expect("whole");
    assert_ne!(Some(now.boot_id), position.map(|position| position.boot_id));
    assert!(again.blocks.is_empty(), "no model is registered");
    let model = register(&client, "kivi-4", &[]).await;
    again.take_until(&mut watch, |of| of.keys_in(BlockTier::Disk) == set_of(&known)).await;
    assert!(again.keys_in(BlockTier::Pool).is_empty());
    // Every block that was told of can be attached.
    assert_eq!(matched(&client, model, 1).await, [PUBLISHED, 0]);
    read(&client, model, 1).await;
    again.take_until(&mut watch, |of| of.keys_in(BlockTier::Pool) == set_of(&known)).await;
    assert_eq!(again.resets, 1);
    second.signal("TERM");
    let drained = end_of(&mut watch).await;
    assert_eq!(drained.code, Some(ErrorCode::ShuttingDown), "{drained}");
}
