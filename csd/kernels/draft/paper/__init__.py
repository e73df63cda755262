"""Operations of published drafters, for comparison."""
