"""Talks to kvd without any .proto file: the daemon describes itself by gRPC reflection.

Needs numpy, grpcio and grpcio-reflection, and a daemon (`kvd serve`). See README.md beside it.
"""

import argparse
import sys

import grpc
import numpy as np
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)


class Reflected:
    """Any service of a server, called by name with keyword arguments."""

    def __init__(self, address):
        self.channel = grpc.insecure_channel(address)
        self.database = ProtoReflectionDescriptorDatabase(self.channel)
        self.pool = DescriptorPool(self.database)

    def services(self):
        return sorted(self.database.get_services())

    def methods(self, service):
        return self.pool.FindServiceByName(service).methods

    def call(self, path, **fields):
        service, name = path.split("/")
        method = self.pool.FindServiceByName(service).methods_by_name[name]
        request = GetMessageClass(method.input_type)(**fields)
        reply = GetMessageClass(method.output_type)
        kind = ("stream" if method.client_streaming else "unary") + "_" + (
            "stream" if method.server_streaming else "unary")
        rpc = getattr(self.channel, kind)(
            f"/{path}", request_serializer=lambda m: m.SerializeToString(),
            response_deserializer=reply.FromString)
        answer = rpc(iter([request]) if method.client_streaming else request, timeout=30)
        return list(answer) if method.server_streaming else answer


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--address", default="127.0.0.1:7070")
    address = parser.parse_args().address
    kvd = Reflected(address)
    try:
        talk(kvd)
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            raise
        sys.exit(f"no daemon at {address}: start `kvd serve`, or give --address")


def talk(kvd):
    """Lists what there is and attends over three tokens."""
    for service in kvd.services():
        print(service)
    for method in kvd.methods("kvd.v1.Kvd"):
        arrows = ["stream " if streams else "" for streams in
                  (method.client_streaming, method.server_streaming)]
        print(f"  {method.name}({arrows[0]}{method.input_type.name})"
              f" -> {arrows[1]}{method.output_type.name}")
    health = kvd.call("grpc.health.v1.Health/Check", service="kvd.v1.Kvd")
    print("health:", str(health).strip())

    geometry = dict(layers=1, kv_heads=1, head_dim_k=4, head_dim_v=4, dtype="DTYPE_F32")
    model = kvd.call("kvd.v1.Kvd/RegisterModel", name="reflected", codec="raw", geometry=geometry)
    sequence = kvd.call("kvd.v1.Kvd/OpenSequence", model_id=model.model_id)
    rows = np.eye(3, 4, dtype="<f4").tobytes()
    [stored] = kvd.call(
        "kvd.v1.Kvd/StoreBlocks", sequence_id=sequence.sequence_id, layer=0, start=0, tokens=3,
        k=dict(inline=rows), v=dict(inline=rows))
    print("stored:", str(stored).strip())
    q = np.array([1, 0, 0, 0], dtype="<f4").tobytes()
    reply = kvd.call(
        "kvd.v1.Kvd/Attend", model_id=model.model_id, layer=0, q_heads=1, dtype="DTYPE_F32",
        queries=[dict(sequence_id=sequence.sequence_id, n_q=1)], q=dict(inline=q))
    weights = np.exp([0.5, 0, 0]) / np.exp([0.5, 0, 0]).sum()
    print("out:", np.frombuffer(reply.out.inline, "<f4"), "expected:",
          (weights @ np.eye(3, 4)).astype("<f4"))
    print("lse:", np.frombuffer(reply.lse.inline, "<f4"), "expected:",
          np.log(np.exp([0.5, 0, 0]).sum()).astype("<f4"))
    kvd.call("kvd.v1.Kvd/CloseSequence", sequence_id=sequence.sequence_id)
    kvd.call("kvd.v1.Kvd/UnregisterModel", model_id=model.model_id)


if __name__ == "__main__":
    main()
