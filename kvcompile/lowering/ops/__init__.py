"""Operations of rewritten graphs: schema and eager body, torch only."""
