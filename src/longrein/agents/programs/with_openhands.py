"""An agent on the OpenHands SDK, with its terminal tool.

OPENAI_BASE_URL=… OPENAI_API_KEY=… python with_openhands.py MODEL INSTRUCTION
"""

import os
import sys
from pathlib import Path

from openhands.sdk import LLM, Agent, Conversation, Tool
from openhands.sdk.conversation.state import ConversationExecutionStatus
from openhands.tools.terminal import TerminalTool
from pydantic import SecretStr


def main(model: str, instruction: str) -> int:
    llm = LLM(
        model=f"openai/{model}",
        base_url=os.environ["OPENAI_BASE_URL"],
        api_key=SecretStr(os.environ["OPENAI_API_KEY"]),
        usage_id="agent",
    )
    agent = Agent(llm=llm, tools=[Tool(name=TerminalTool.name)])
    conversation = Conversation(agent=agent, workspace=str(Path.cwd()))
    conversation.send_message(instruction)
    conversation.run()
    return 0 if conversation.state.execution_status == ConversationExecutionStatus.FINISHED else 1


sys.exit(main(*sys.argv[1:]))
