"""Problems: kinds of files (`tasks`), and data sets by name (`data_sets`)."""
