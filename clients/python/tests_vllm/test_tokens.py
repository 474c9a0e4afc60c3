"""With `raw` every greedy token is that of vLLM without the connector."""


def test_prefixes_come_back(engine, stock):
    one = engine()
    cold, did = one.counted(stock["asked"])
    assert cold == stock["cold"]
    assert did["stored_tokens"] >= 2500 and did["loaded_tokens"] == 0
    again, did = one.counted(stock["asked"])
    assert again == stock["cold"]
    assert did["loaded_tokens"] == 0, "vLLM had them itself"
    one.forget()
    reloaded, did = one.counted(stock["asked"])
    assert reloaded == stock["cold"]
    assert did["loaded_tokens"] >= 2500 and did["load_failures"] == 0
    assert did["stored_tokens"] == 0, "all of it was there"
    one.forget()
    second, did = one.counted(stock["turn"])
    assert second == stock["second"]
    assert did["loaded_tokens"] >= 2500 and did["stored_tokens"] > 0
