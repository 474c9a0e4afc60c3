//! Sequences of launches that repeat, as graphs: one call of the driver instead of one per kernel,
//! and kernels of a stage side by side. A sequence is known by its owner (a layer of a model) and
//! its kernels. It is launched kernel by kernel the first time, made a graph the second time, and
//! from then on launched as one, after what differs from the graph was changed in it. Every
//! word of every parameter is compared, so a graph runs exactly what it stands for. Where changes
//! would cost more calls than they save (callers of other batch sizes take turns), the sequence is
//! launched kernel by kernel and the graph stays as it is, until such words repeat.

use super::memory::DeviceMemory;
use crate::driver::{GraphId, GraphNode, KernelLaunch};
use kvd_compute::{BackendError, Launches};
use kvd_core::{Coded, ErrorCode, LayerIndex, ModelId};

/// A launch that is still to come.
pub(super) struct LaunchNode {
    pub(super) stage: u32,
    pub(super) kernel: String,
    pub(super) blocks: u32,
    pub(super) threads: u32,
    pub(super) shared_bytes: u32,
    pub(super) parameters: Vec<u8>,
}

impl LaunchNode {
    fn to_launch(&self) -> KernelLaunch<'_> {
        KernelLaunch {
            kernel: &self.kernel,
            blocks: self.blocks,
            threads: self.threads,
            shared_bytes: self.shared_bytes,
            parameters: &self.parameters,
        }
    }

    fn is_like(&self, other: &Self) -> bool {
        self.stage == other.stage && self.kernel == other.kernel
    }

    fn equals_node(&self, other: &Self) -> bool {
        let sizes = |node: &Self| (node.blocks, node.threads, node.shared_bytes);
        sizes(self) == sizes(other) && self.parameters == other.parameters
    }
}

/// The model and layer that a graph's launches belong to.
pub(super) type GraphOwner = (ModelId, LayerIndex);

/// A sequence of launches.
struct KnownSequence {
    owner: GraphOwner,
    /// As they stand in the graph; without parameters while there is none.
    nodes: Vec<LaunchNode>,
    graph: Option<GraphId>,
    /// As they were launched last, where that was not as the graph.
    last: Option<Vec<LaunchNode>>,
    used: u64,
}

impl KnownSequence {
    fn is_sequence(&self, owner: GraphOwner, nodes: &[LaunchNode]) -> bool {
        self.owner == owner
            && self.nodes.len() == nodes.len()
            && self.nodes.iter().zip(nodes).all(|(a, b)| a.is_like(b))
    }

    /// Whether nodes are to run as the graph: changing it takes fewer calls than launching them one
    /// by one, or would have, had it been changed to what was launched last, and so they repeat.
    fn graph_pays(&self, nodes: &[LaunchNode]) -> bool {
        let saves = |old: &Vec<LaunchNode>| changed_nodes(old, nodes).count() + 1 < nodes.len();
        saves(&self.nodes) || self.last.as_ref().is_some_and(saves)
    }
}

/// Nodes that differ, by number.
fn changed_nodes<'a>(
    old: &'a [LaunchNode],
    new: &'a [LaunchNode],
) -> impl Iterator<Item = (usize, &'a LaunchNode)> {
    let pairs = old.iter().zip(new).enumerate();
    pairs.filter(|(_, (old, new))| !old.equals_node(new)).map(|(at, (_, new))| (at, new))
}

/// Where a sequence is known, and its graph, if it is to run as one.
type RunChoice = Option<(usize, Option<GraphId>)>;

/// Sequences of one device, at most so many; none where the driver has refused a graph.
pub(super) struct GraphCache {
    most: usize,
    known: Vec<KnownSequence>,
    clock: u64,
    launches: Launches,
}

impl GraphCache {
    pub(super) fn new(most: usize) -> Self {
        Self { most, known: Vec::new(), clock: 0, launches: Launches::default() }
    }

    pub(super) fn launches(&self) -> &Launches {
        &self.launches
    }

    /// Gives graphs back that `of` picks.
    pub(super) fn forget_graphs(
        &mut self,
        device: &mut DeviceMemory,
        of: impl Fn(GraphOwner) -> bool,
    ) {
        for known in self.known.extract_if(.., |known| of(known.owner)) {
            known.graph.into_iter().for_each(|graph| device.destroy_graph(graph));
        }
    }

    /// Launches all nodes, whose stages rise; those without thread blocks are left out.
    pub(super) fn run_nodes(
        &mut self,
        device: &mut DeviceMemory,
        owner: GraphOwner,
        mut nodes: Vec<LaunchNode>,
    ) -> Result<(), BackendError> {
        nodes.retain(|node| node.blocks > 0);
        let way = match self.choose_run(device, owner, &nodes) {
            // The device goes on without graphs, and says so.
            Err(error) if error.code() == ErrorCode::InvalidArgument => {
                self.launches.graphs_off = Some(error.to_string());
                self.most = 0;
                self.forget_graphs(device, |_| true);
                None
            }
            way => way?,
        };
        if let Some((index, Some(graph))) = way {
            if let Err(error) = device.launch_graph(graph) {
                self.drop_graph(device, index);
                return Err(error);
            }
            let known = &mut self.known[index];
            (known.nodes, known.last) = (nodes, None);
            self.launches.graphs += 1;
            return Ok(());
        }
        for node in &nodes {
            device.launch_kernel(node.to_launch())?;
            self.launches.kernels += 1;
        }
        if let Some((index, None)) = way {
            self.known[index].last = Some(nodes);
        }
        Ok(())
    }

    /// How such nodes are to run; a graph has all of their words by then.
    fn choose_run(
        &mut self,
        device: &mut DeviceMemory,
        owner: GraphOwner,
        nodes: &[LaunchNode],
    ) -> Result<RunChoice, BackendError> {
        if self.most == 0 || nodes.len() < 2 {
            return Ok(None);
        }
        self.clock += 1;
        let Some(index) = self.known.iter().position(|known| known.is_sequence(owner, nodes))
        else {
            self.learn_sequence(device, owner, nodes);
            return Ok(None);
        };
        let known = &mut self.known[index];
        known.used = self.clock;
        if let Some(graph) = known.graph {
            if !known.graph_pays(nodes) {
                return Ok(Some((index, None)));
            }
            let updated = changed_nodes(&known.nodes, nodes).try_for_each(|(at, node)| {
                device.update_graph(graph, at, node.to_launch())?;
                self.launches.nodes_updated += 1;
                Ok(())
            });
            if let Err(error) = updated {
                self.drop_graph(device, index);
                return Err(error);
            }
            return Ok(Some((index, Some(graph))));
        }
        let all =
            nodes.iter().map(|node| GraphNode { stage: node.stage, launch: node.to_launch() });
        let graph = device.build_graph(&all.collect::<Vec<_>>())?;
        known.graph = Some(graph);
        self.launches.graphs_built += 1;
        Ok(Some((index, Some(graph))))
    }

    /// Gives the graph of a sequence back after an error: some of its nodes may have other words by
    /// then than are known of it, which a later call would run.
    fn drop_graph(&mut self, device: &mut DeviceMemory, index: usize) {
        let graph = self.known[index].graph.take();
        graph.into_iter().for_each(|graph| device.destroy_graph(graph));
    }

    /// Keeps nodes in mind. Where there is no room, the sequence that was not used for the longest
    /// time makes some, unless it is still in use: sequences that are asked in turns, one more than
    /// there is room for, would else drive each other out, and none would become a graph.
    fn learn_sequence(
        &mut self,
        device: &mut DeviceMemory,
        owner: GraphOwner,
        nodes: &[LaunchNode],
    ) {
        if self.known.len() >= self.most {
            let oldest = (0..self.known.len()).min_by_key(|index| self.known[*index].used);
            let idle = 4 * self.most as u64;
            let gone = oldest.filter(|index| self.clock - self.known[*index].used > idle);
            let Some(known) = gone.map(|index| self.known.swap_remove(index)) else { return };
            known.graph.into_iter().for_each(|graph| device.destroy_graph(graph));
        }
        let name = |node: &LaunchNode| LaunchNode {
            parameters: Vec::new(),
            kernel: node.kernel.clone(),
            ..*node
        };
        let nodes = nodes.iter().map(name).collect();
        self.known.push(KnownSequence { owner, nodes, graph: None, last: None, used: self.clock });
    }
}
