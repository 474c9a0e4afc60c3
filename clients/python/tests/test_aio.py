"""asyncio: calls under way together, and an error that reaches its caller."""

import asyncio

import numpy as np
import pytest

import kvd
import kvd.aio


def test_calls_run_beside_one_another(server):
    async def use():
        async with await kvd.aio.connect(server.region) as client:
            model = await client.model("aio", kvd.Geometry(1, 2, 64), dtype="f32", codec="raw")

            async def one(value):
                sequence = await model.open()
                rows = np.full((20, 2, 64), value, "f4")
                await sequence.store(0, rows, rows)
                await sequence.truncate(10)
                child = await sequence.fork()
                await sequence.close()
                attended = await model.attend(0, [child], np.ones((1, 4, 64), "f4"))
                assert (await child.describe()).length == 10
                with pytest.raises(kvd.UnknownSequence):
                    await sequence.describe()
                return attended.out

            outs = await asyncio.gather(*(one(value) for value in range(1, 9)))
            for value, out in enumerate(outs, 1):
                np.testing.assert_allclose(out, value, rtol=1e-3)
            assert (await client.info()).boot_id == client.sync.boot_id

    asyncio.run(use())
