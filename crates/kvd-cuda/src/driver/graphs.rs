//! Graphs of kernels, by number. Not yet run on a GPU. Their functions are looked for before the
//! first graph is made: a driver without them launches kernels one by one.
//!
//! Unsafe code: calls of the driver's C functions, in a context that the caller has made current.
#![expect(unsafe_code, reason = "calls of the driver's C functions")]

use super::cuda::check_call;
use super::probe::find_missing_symbol;
use super::shared::check_call as refuse;
use super::slots::HandleSlots;
use super::{DriverError, GraphId, KernelLaunch};
use cudarc::driver::sys::{self, CUresult};
use std::ffi::{CStr, c_void};
use std::ptr;

/// Driver functions that this file calls.
const SYMBOLS: [&CStr; 8] = [
    c"cuGraphCreate",
    c"cuGraphDestroy",
    c"cuGraphAddKernelNode_v2",
    c"cuGraphInstantiateWithFlags",
    c"cuGraphUpload",
    c"cuGraphExecKernelNodeSetParams_v2",
    c"cuGraphExecDestroy",
    c"cuGraphLaunch",
];

/// A kernel of a graph.
pub(super) struct KernelNode<'a> {
    pub(super) stage: u32,
    pub(super) function: sys::CUfunction,
    pub(super) launch: KernelLaunch<'a>,
}

/// A graph, its executable form, and its nodes.
struct CudaGraph {
    graph: sys::CUgraph,
    executable: sys::CUgraphExec,
    nodes: Vec<(sys::CUgraphNode, sys::CUfunction)>,
}

/// Graphs that were made.
#[derive(Default)]
pub(super) struct CudaGraphs(HandleSlots<CudaGraph>);

/// The driver's words for a launch, whose parameter is behind `parameters`.
fn node_params(
    func: sys::CUfunction,
    launch: &KernelLaunch<'_>,
    parameters: &mut [*mut c_void; 1],
) -> sys::CUDA_KERNEL_NODE_PARAMS {
    sys::CUDA_KERNEL_NODE_PARAMS {
        func,
        gridDimX: launch.blocks,
        gridDimY: 1,
        gridDimZ: 1,
        blockDimX: launch.threads,
        blockDimY: 1,
        blockDimZ: 1,
        sharedMemBytes: launch.shared_bytes,
        kernelParams: parameters.as_mut_ptr(),
        extra: ptr::null_mut(),
        kern: ptr::null_mut(),
        ctx: ptr::null_mut(),
    }
}

fn launch_parameters(launch: &KernelLaunch<'_>) -> [*mut c_void; 1] {
    [launch.parameters.as_ptr().cast_mut().cast()]
}

/// Says which function the driver lacks; none is called then.
fn check_functions() -> Result<(), DriverError> {
    let Some(symbol) = find_missing_symbol(&SYMBOLS) else { return Ok(()) };
    let reason = format!("the driver lacks {}", symbol.to_string_lossy());
    Err(DriverError::Refused { call: "build_graph", reason })
}

/// Maps a driver's result. A refused graph, or no memory for one, does not stick; any other error
/// may come from earlier work, and sticks as one of a launch does.
fn check_graph_call(call: &'static str, result: CUresult) -> Result<(), DriverError> {
    match result {
        CUresult::CUDA_ERROR_NOT_SUPPORTED
        | CUresult::CUDA_ERROR_NOT_PERMITTED
        | CUresult::CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE
        | CUresult::CUDA_ERROR_INVALID_VALUE
        | CUresult::CUDA_ERROR_OUT_OF_MEMORY => refuse(call, result),
        result => check_call(call, result),
    }
}

fn unknown_graph(call: &'static str) -> DriverError {
    DriverError::Refused { call, reason: "no such graph or node".to_owned() }
}

impl CudaGraphs {
    /// Makes a graph of functions, with the memory that it takes of the device.
    pub(super) fn build_graph(
        &mut self,
        nodes: &[KernelNode<'_>],
        stream: sys::CUstream,
    ) -> Result<GraphId, DriverError> {
        check_functions()?;
        let mut made =
            CudaGraph { graph: ptr::null_mut(), executable: ptr::null_mut(), nodes: Vec::new() };
        // SAFETY: the function is there; writes the handle.
        check_graph_call("cuGraphCreate", unsafe { sys::cuGraphCreate(&raw mut made.graph, 0) })?;
        made.add_nodes(nodes, stream).inspect_err(|_| made.close_graph())?;
        Ok(GraphId(self.0.insert_handle(made)))
    }

    pub(super) fn update_node(
        &self,
        graph: GraphId,
        node: usize,
        launch: &KernelLaunch<'_>,
    ) -> Result<(), DriverError> {
        let call = "cuGraphExecKernelNodeSetParams";
        let graph = self.0.get(graph.0).ok_or_else(|| unknown_graph(call))?;
        let (node, function) = *graph.nodes.get(node).ok_or_else(|| unknown_graph(call))?;
        let mut parameters = launch_parameters(launch);
        let words = node_params(function, launch, &mut parameters);
        // SAFETY: a node of the graph that the executable was made of, with its own function; the
        // parameter is copied before the call returns.
        let result = unsafe {
            sys::cuGraphExecKernelNodeSetParams_v2(graph.executable, node, &raw const words)
        };
        check_graph_call(call, result)
    }

    pub(super) fn launch_graph(
        &self,
        graph: GraphId,
        stream: sys::CUstream,
    ) -> Result<CUresult, DriverError> {
        let graph = self.0.get(graph.0).ok_or_else(|| unknown_graph("cuGraphLaunch"))?;
        // SAFETY: an executable graph and a stream of one context; what its kernels do with the
        // addresses in their parameters is the caller's promise.
        Ok(unsafe { sys::cuGraphLaunch(graph.executable, stream) })
    }

    pub(super) fn destroy_graph(&mut self, graph: GraphId) {
        self.0.remove_handle(graph.0).into_iter().for_each(|graph| graph.close_graph());
    }

    pub(super) fn clear(&mut self) {
        self.0.take_all().for_each(|graph| graph.close_graph());
    }
}

impl CudaGraph {
    /// Adds nodes, each behind all of the stage before its own, and makes what is launched. It is
    /// uploaded at once: that the device has no memory for it is a refusal here, and a failure in a
    /// launch.
    fn add_nodes(
        &mut self,
        nodes: &[KernelNode<'_>],
        stream: sys::CUstream,
    ) -> Result<(), DriverError> {
        let mut before = Vec::new();
        for stage in nodes.chunk_by(|a, b| a.stage == b.stage) {
            let added = stage.iter().map(|node| self.add_node(&before, node));
            before = added.collect::<Result<_, _>>()?;
        }
        // SAFETY: writes the handle; no flags.
        let result =
            unsafe { sys::cuGraphInstantiateWithFlags(&raw mut self.executable, self.graph, 0) };
        check_graph_call("cuGraphInstantiate", result)?;
        // SAFETY: an executable graph and a stream of one context.
        check_graph_call("cuGraphUpload", unsafe { sys::cuGraphUpload(self.executable, stream) })
    }

    fn add_node(
        &mut self,
        before: &[sys::CUgraphNode],
        kernel: &KernelNode<'_>,
    ) -> Result<sys::CUgraphNode, DriverError> {
        let KernelNode { function, launch, .. } = kernel;
        let mut node = ptr::null_mut();
        let mut parameters = launch_parameters(launch);
        let words = node_params(*function, launch, &mut parameters);
        // SAFETY: writes the handle; the nodes before are this graph's, and the parameter is copied
        // before the call returns.
        let result = unsafe {
            sys::cuGraphAddKernelNode_v2(
                &raw mut node,
                self.graph,
                before.as_ptr(),
                before.len(),
                &raw const words,
            )
        };
        check_graph_call("cuGraphAddKernelNode", result)?;
        self.nodes.push((node, *function));
        Ok(node)
    }

    /// Gives it back. An error is one that stuck before.
    fn close_graph(&self) {
        // SAFETY: made above, and given back once: out of its slot, or before it got there.
        unsafe {
            if !self.executable.is_null() {
                let _ = sys::cuGraphExecDestroy(self.executable);
            }
            let _ = sys::cuGraphDestroy(self.graph);
        }
    }
}
