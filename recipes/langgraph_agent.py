"""A graph of LangGraph: two drafts side by side, then an answer. Each branch is a conversation of its own."""

from __future__ import annotations

import operator
from typing import Annotated, Any, TypedDict

from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph


class Work(TypedDict):
    """What the nodes share."""

    question: str
    drafts: Annotated[list[str], operator.add]
    answer: str


async def solve(task: Any, url: str) -> str:
    """Run the graph on one question."""
    model = ChatOpenAI(base_url=url, api_key="none", model="policy", max_tokens=24, max_retries=0)

    def drafting(how: str) -> Any:
        async def draft(work: Work) -> dict[str, list[str]]:
            said = await model.ainvoke([("system", how), ("user", work["question"])])
            return {"drafts": [str(said.content)]}

        return draft

    async def conclude(work: Work) -> dict[str, str]:
        drafts = "\n".join(sorted(work["drafts"]))
        said = await model.ainvoke([("user", f"{work['question']}\nTwo drafts:\n{drafts}\nYour answer:")])
        return {"answer": str(said.content)}

    graph = StateGraph(Work)
    for name, how in (("plain", "Be brief."), ("careful", "Think first.")):
        graph.add_node(name, drafting(how))
        graph.add_edge(START, name)
    graph.add_node("conclude", conclude)
    graph.add_edge(["plain", "careful"], "conclude")
    graph.add_edge("conclude", END)
    done = await graph.compile().ainvoke({"question": task.prompt[-1].content, "drafts": [], "answer": ""})
    return str(done["answer"])
