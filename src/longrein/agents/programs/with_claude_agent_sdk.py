"""An agent on the Claude Agent SDK.

ANTHROPIC_BASE_URL=… ANTHROPIC_AUTH_TOKEN=… python with_claude_agent_sdk.py MODEL INSTRUCTION
"""

import asyncio
import sys

from claude_agent_sdk import AssistantMessage, ClaudeAgentOptions, ResultMessage, TextBlock, query


async def main(model: str, instruction: str) -> int:
    options = ClaudeAgentOptions(
        model=model, tools=["Bash", "Edit", "Read", "Write"], permission_mode="bypassPermissions"
    )
    failed = True
    async for message in query(prompt=instruction, options=options):
        if isinstance(message, AssistantMessage):
            print("\n".join(block.text for block in message.content if isinstance(block, TextBlock)))
        elif isinstance(message, ResultMessage):
            failed = message.is_error
    return 1 if failed else 0


sys.exit(asyncio.run(main(*sys.argv[1:])))
